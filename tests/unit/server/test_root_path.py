"""--root-path: the server behind a proxy, which may remove the path or not."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from starlette.types import ASGIApp

from fakes.service import FakeService
from llaisys.config import Config, load_config
from llaisys.errors import RejectedError
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.listener import ConnectionStats
from llaisys.server.middleware.rate_limits import OpenRequestLimitMiddleware
from llaisys.server.middleware.root_path import RootPathMiddleware
from llaisys.server.state import ServerState


@pytest.fixture
def state(engine: FakeService) -> ServerState:
    config = Config(root_path="/llm", api_key=("secret",))
    return ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]  # has AsyncLLM's surface


def client_of(app: ASGIApp, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(RootPathMiddleware(app, "/llm"))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers)


async def test_paths_are_served_with_and_without_it(state: ServerState) -> None:
    async with client_of(create_app(state, 8000), authorization="Bearer secret") as client:
        for root in ("", "/llm"):
            assert (await client.get(f"{root}/v1/models")).json()["data"][0]["id"] == "tiny"
            body = {"prompt": "hi", "stream": True}
            assert (await client.post(f"{root}/v1/completions", json=body)).text.endswith("[DONE]\n\n")
            assert (await client.get(f"{root}/openapi.json")).json()["servers"] == [{"url": "/llm"}]
        assert (await client.get("/llm")).headers["content-type"].startswith("text/html")
        for path in ("/llm/llm/v1/models", "/llmx/v1/models", "/v1/llm/models", "/LLM/v1/models"):
            assert (await client.get(path)).status_code == 404


async def test_every_check_applies_below_it(state: ServerState) -> None:
    """The client has no key."""
    async with client_of(create_app(state, 8000)) as client:
        for root in ("", "/llm"):
            assert (await client.get(f"{root}/v1/models")).status_code == 401
            assert (await client.get(f"{root}/health")).status_code == 200
            evil = await client.get(f"{root}/v1/models", headers={"host": "evil.example"})
            assert evil.json()["error"]["code"] == "invalid_host"
            assert (await client.get(f"{root}/livez", headers={"host": "evil.example"})).status_code == 200
        state.draining = True
        assert (await client.get("/llm/health")).status_code == 503


async def test_probes_below_it_are_answered_at_the_limit_of_open_requests(state: ServerState) -> None:
    full = OpenRequestLimitMiddleware(create_app(state, 8000), ConnectionStats(), maximum=0)
    async with client_of(full) as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 503


async def test_without_it_the_document_names_no_server(
    engine: FakeService, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    async with make_client(ServerState(Config(), models=ModelRegistry([engine]))) as client:  # type: ignore[list-item]
        assert "servers" not in (await client.get("/openapi.json")).json()
        assert (await client.get("/llm/v1/models")).status_code == 404


@pytest.mark.parametrize(
    ("given", "path"), [("", ""), ("/", ""), ("/llm", "/llm"), ("/llm/", "/llm"), ("/a-1/b.c~", "/a-1/b.c~")]
)
def test_a_slash_at_its_end_is_removed(given: str, path: str) -> None:
    assert load_config({"root_path": given}).root_path == path


@pytest.mark.parametrize("given", ["llm", "//llm", "/a//b", "/a?b", "http://host/llm", "/é", "/a b"])
def test_what_is_no_path_is_refused(given: str) -> None:
    with pytest.raises(RejectedError, match=r"root_path.*/llm"):
        load_config({"root_path": given})
