"""The application on a scripted engine, reached through ASGI without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from fakes.service import FakeService, default_config
from llaisys.registry import ModelRegistry
from llaisys.server import app as application
from llaisys.server.app import create_app
from llaisys.server.state import ServerState
from llaisys.server.webui.chat_store import ChatStore

PORT = 8000


@pytest.fixture
def engine() -> FakeService:
    return FakeService()


@pytest.fixture
def state(engine: FakeService) -> ServerState:
    return ServerState(default_config(), models=ModelRegistry([engine]))  # type: ignore[list-item]  # the fake has AsyncLLM's surface


@pytest.fixture
def app(state: ServerState) -> ASGIApp:
    return create_app(state, PORT)


@pytest.fixture
def routes(state: ServerState) -> list[APIRoute]:
    """Return every route of the application."""

    def flat(routes: list[Any]) -> Iterator[Any]:
        """Yield all routes. FastAPI does not flatten included routers."""
        for route in routes:
            router = getattr(route, "original_router", None)
            yield from [route] if router is None else flat(router.routes)

    return [route for route in flat(application.create_routes(state).routes) if isinstance(route, APIRoute)]


@pytest.fixture
def calls_with(routes: list[APIRoute]) -> Callable[[str, str], list[tuple[str, str]]]:
    """Return the method and path of each route that has an id in its path, such as `session_id`."""

    def calls(name: str, value: str) -> list[tuple[str, str]]:
        named = [route for route in routes if f"{{{name}}}" in route.path]
        assert named
        return [
            (method, route.path.replace(f"{{{name}}}", value))
            for route in named
            for method in sorted(route.methods)
        ]

    return calls


@pytest.fixture
def make_client() -> Callable[..., httpx.AsyncClient]:
    def make(state: ServerState, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(create_app(state, PORT))
        return httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}", headers=headers)

    return make


@pytest.fixture
async def client(
    state: ServerState, make_client: Callable[..., httpx.AsyncClient]
) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(state) as made:
        yield made


@pytest.fixture
def chat_body() -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def chats(
    state: ServerState, store: ChatStore, make_client: Callable[..., httpx.AsyncClient]
) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a server with the chat store of the test's module."""
    state.chats = store
    async with make_client(state) as made:
        yield made
