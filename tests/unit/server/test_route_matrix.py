"""Limits and isolation of every route, by enumeration: a new route without a row in a table here fails.

`test_hosts.py` requests every route for keys, hosts and origins.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
from fastapi.routing import APIRoute

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.registry import ModelRegistry
from llaisys.server.middleware.auth import Keyring
from llaisys.server.middleware.rate_limits import COUNTED, QUEUEING
from llaisys.server.state import ServerState

# Ids in paths that belong to a key, and the module that calls every route of each with another key.
ISOLATED = {
    "response_id": "test_responses_stored.py",
    "request_id": "test_requests.py",
    "session_id": "test_sessions.py",
    "chat_id": "test_chats.py",
}
# Names in paths that all keys share: models, and files of the web UI.
SHARED = {"name", "name:path"}
# Routes with a body that no request enters the queue of a model for.
NOT_QUEUEING = {
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/api/show",
    "/api/pull",
    "/v1/sessions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}


def calls(routes: list[APIRoute]) -> list[tuple[str, str]]:
    """Return method and path of each route that rate limits count."""
    filled = [(route, re.sub(r"\{[^}]*\}", "x", route.path)) for route in routes]
    return [(method, path) for route, path in filled for method in sorted(route.methods & set(COUNTED))]


def test_every_id_in_a_path_belongs_to_a_key(routes: list[APIRoute]) -> None:
    ids = {name for route in routes for name in re.findall(r"\{([^}]*)\}", route.path)}
    assert ids == ISOLATED.keys() | SHARED


def test_every_route_is_bounded_by_the_queue_or_enters_none(routes: list[APIRoute]) -> None:
    posts = {route.path for route in routes if "POST" in route.methods and "{" not in route.path}
    assert posts - QUEUEING == NOT_QUEUEING
    assert posts >= QUEUEING


async def test_no_route_reads_a_body_over_the_limit(
    engine: FakeService, routes: list[APIRoute], make_client: Callable[..., httpx.AsyncClient]
) -> None:
    state = ServerState(Config(max_body_bytes=100), models=ModelRegistry([engine]))  # type: ignore[list-item]  # has AsyncLLM's surface
    async with make_client(state) as client:
        for method, path in calls(routes):
            response = await client.request(method, path, content=b"x" * 101)
            assert response.status_code == 413, (method, path)
    assert not engine.calls


async def test_rate_limits_apply_to_every_route(
    engine: FakeService, routes: list[APIRoute], make_client: Callable[..., httpx.AsyncClient]
) -> None:
    """One request is allowed. Only a cancellation is not counted, because it frees what others wait for."""
    config = Config(api_key=("a",), max_requests_per_minute_per_key=1)
    for method, path in calls(routes):
        state = ServerState(config, keys=Keyring.of(config), models=ModelRegistry([engine]))  # type: ignore[list-item]
        async with make_client(state, authorization="Bearer a") as client:
            statuses = [(await client.request(method, path, json={})).status_code for _ in range(2)]
        assert statuses[0] != 429, (method, path)
        assert (statuses[1] == 429) != path.endswith("/cancel"), (method, path)
