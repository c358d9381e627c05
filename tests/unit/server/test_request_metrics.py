"""--enable-per-request-metrics: vLLM's `metrics`, in an object or with the usage of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.outputs import RequestStateStats
from llaisys.registry import ModelRegistry
from llaisys.server.state import ServerState
from sse import chunks, named_events

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
STATS = RequestStateStats(1.7e9, 10.0, 10.5, 10.75, 12.75, 0.75, 5)
METRICS = {
    "time_to_first_token_ms": 250.0,
    "generation_time_ms": 2000.0,
    "queue_time_ms": 500.0,
    "mean_itl_ms": 500.0,
    "tokens_per_second": 5 / 2.25,
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def engine() -> FakeService:
    return FakeService(metrics=STATS)


@pytest.fixture
def state(engine: FakeService) -> ServerState:
    config = Config(enable_per_request_metrics=True)
    return ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]  # has AsyncLLM's surface


@pytest.mark.parametrize("url", BODIES)
async def test_an_object_has_the_metrics(client: httpx.AsyncClient, url: str) -> None:
    assert (await client.post(url, json=BODIES[url])).json()["metrics"] == METRICS


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_a_stream_has_them_with_its_usage(client: httpx.AsyncClient, url: str) -> None:
    *others, last = chunks((await client.post(url, json={**BODIES[url], **STREAM})).content)
    assert last["metrics"] == METRICS
    assert last["usage"]["completion_tokens"] == 3
    assert not any("metrics" in chunk for chunk in others)
    without = (await client.post(url, json={**BODIES[url], "stream": True})).text
    assert "metrics" not in without


async def test_a_stream_of_responses_ends_with_them(client: httpx.AsyncClient) -> None:
    response = await client.post(RESPONSES, json={**BODIES[RESPONSES], "stream": True})
    *others, last = named_events(response.content)
    assert last["response"]["metrics"] == METRICS
    assert not any("metrics" in event.get("response", {}) for event in others)


async def test_several_choices_or_prompts_have_none(client: httpx.AsyncClient) -> None:
    for url, more in ((CHAT, {"n": 2}), (COMPLETIONS, {"n": 2}), (COMPLETIONS, {"prompt": ["a", "b"]})):
        body = {**BODIES[url], **more}
        assert (await client.post(url, json=body)).json()["metrics"] is None
        assert "metrics" not in (await client.post(url, json={**body, **STREAM})).text


async def test_without_a_token_all_are_null(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.metrics = RequestStateStats(1.7e9, 10.0)
    made = (await client.post(CHAT, json=BODIES[CHAT])).json()["metrics"]
    assert made == dict.fromkeys(METRICS)
    engine.metrics = RequestStateStats(1.7e9, 10.0, 10.5, 10.5, 10.5, 0.5, 1)
    made = (await client.post(CHAT, json=BODIES[CHAT])).json()["metrics"]
    assert (made["generation_time_ms"], made["mean_itl_ms"], made["tokens_per_second"]) == (0.0, None, None)


async def test_without_the_flag_they_are_null(
    engine: FakeService, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    async with make_client(ServerState(Config(), models=ModelRegistry([engine]))) as client:  # type: ignore[list-item]
        for url in (CHAT, COMPLETIONS):
            assert (await client.post(url, json=BODIES[url])).json()["metrics"] is None
            assert "metrics" not in (await client.post(url, json={**BODIES[url], **STREAM})).text
        assert "metrics" not in (await client.post(RESPONSES, json=BODIES[RESPONSES])).json()
