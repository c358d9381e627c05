"""Health probes over the life of the server, and other routes before a model is loaded."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fakes.service import FakeService
from llaisys.config import Config, package_version
from llaisys.server.state import ServerState

OK = (200, None)


async def probes(client: httpx.AsyncClient) -> dict[str, tuple[int, str | None]]:
    """Return status and error code of each probe, after checking that HEAD has the same status."""
    found = {}
    for name in ("livez", "health", "ready"):
        response = await client.get(f"/{name}")
        assert (await client.head(f"/{name}")).status_code == response.status_code
        body = response.json()
        is_ok = response.status_code == 200
        assert body["status"] == ("ok" if is_ok else "unavailable")
        assert ("retry-after" in response.headers) == (not is_ok)
        found[name] = (response.status_code, body.get("error", {}).get("code"))
    return found


async def test_probes_over_the_life_of_the_server(
    state: ServerState, engine: FakeService, client: httpx.AsyncClient
) -> None:
    """Only `/livez` is liveness: the others are 503 whenever a request would be."""

    def expected(code: str) -> dict[str, tuple[int, str | None]]:
        return {"livez": OK, "health": (503, code), "ready": (503, code)}

    assert await probes(client) == {"livez": OK, "health": OK, "ready": OK}
    state.draining = True
    assert await probes(client) == expected("shutting_down")
    state.draining = False
    engine.dead = True
    assert await probes(client) == expected("engine_dead")
    state.models = None
    assert await probes(client) == expected("model_loading")


async def test_the_body_of_a_successful_probe(client: httpx.AsyncClient) -> None:
    for name in ("livez", "health", "ready"):
        assert (await client.get(f"/{name}")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("life", "code"), [("loading", "model_loading"), ("draining", "shutting_down"), ("dead", "engine_dead")]
)
async def test_requests_get_the_reason_of_a_503(
    state: ServerState,
    engine: FakeService,
    client: httpx.AsyncClient,
    chat_body: dict[str, Any],
    life: str,
    code: str,
) -> None:
    state.draining = life == "draining"
    engine.dead = life == "dead"
    state.models = None if life == "loading" else state.models
    for response in (
        await client.post("/v1/chat/completions", json=chat_body),
        await client.post("/v1/completions", json={"prompt": "Hi"}),
        await client.get("/v1/models"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (503, code)
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers.get("connection") == ("close" if life == "draining" else None)


async def test_metrics_before_the_model_is_loaded(make_client: Any) -> None:
    async with make_client(ServerState(Config())) as client:
        response = await client.get("/metrics")
        assert response.status_code == 200
        assert "vllm:" not in response.text


async def test_the_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": package_version()}
