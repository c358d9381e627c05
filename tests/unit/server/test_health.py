"""The probes over the server's life, and what else answers before a model is there."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.server.state import ServerState

LOADING = {"livez": 200, "health": 200, "ready": 503}
SERVING = {"livez": 200, "health": 200, "ready": 200}
DEAD = {"livez": 200, "health": 503, "ready": 503}


async def probes(client: httpx.AsyncClient) -> dict[str, int]:
    return {name: (await client.get(f"/{name}")).status_code for name in SERVING}


async def test_probes(state: ServerState, engine: FakeService, client: httpx.AsyncClient) -> None:
    assert await probes(client) == SERVING
    state.draining = True
    assert await probes(client) == LOADING
    state.draining = False
    engine.dead = True
    assert await probes(client) == DEAD
    state.models = None
    assert await probes(client) == LOADING


@pytest.mark.parametrize(
    ("life", "code"), [("loading", "model_loading"), ("draining", "shutting_down"), ("dead", "engine_dead")]
)
async def test_requests_are_told_why_not(
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
    for answer in (
        await client.post("/v1/chat/completions", json=chat_body),
        await client.post("/v1/completions", json={"prompt": "Hi"}),
        await client.get("/v1/models"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers.get("connection") == ("close" if life == "draining" else None)


async def test_metrics_before_the_model_is_loaded(make_client: Any) -> None:
    async with make_client(ServerState(Config())) as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert "vllm:" not in answer.text


async def test_version(client: httpx.AsyncClient) -> None:
    assert set((await client.get("/version")).json()) == {"version"}
