"""Numbers of logprobs in a body: -1 is the whole vocabulary, and `max_logprobs` is the limit."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fakes import core
from fakes.service import FakeService
from llaisys.config import Config

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 1},
}
FIELDS = [
    (CHAT, "top_logprobs", "logprobs"),
    (CHAT, "prompt_logprobs", "prompt_logprobs"),
    (COMPLETIONS, "logprobs", "logprobs"),
    (COMPLETIONS, "prompt_logprobs", "prompt_logprobs"),
]


@pytest.mark.parametrize(("url", "field", "of_engine"), FIELDS)
async def test_minus_one_is_the_whole_vocabulary(
    engine: FakeService, client: httpx.AsyncClient, url: str, field: str, of_engine: str
) -> None:
    engine.config = Config(max_logprobs=-1)
    response = await client.post(url, json={**BODIES[url], field: -1})
    assert response.status_code == 200, response.text
    assert getattr(engine.calls[0].params, of_engine) == core.VOCAB_SIZE


@pytest.mark.parametrize(("url", "field", "of_engine"), FIELDS)
async def test_more_than_the_limit_are_refused_by_name(
    engine: FakeService, client: httpx.AsyncClient, url: str, field: str, of_engine: str
) -> None:
    for limit, n in ((20, 21), (20, -1), (3, 4), (0, 1), (-1, -2), (core.VOCAB_SIZE - 1, -1)):
        engine.config = Config(max_logprobs=limit)
        response = await client.post(url, json={**BODIES[url], field: n})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert not engine.calls
    for limit, n in ((20, 20), (3, 3), (core.VOCAB_SIZE, -1)):
        engine.config = Config(max_logprobs=limit)
        assert (await client.post(url, json={**BODIES[url], field: n})).status_code == 200
        assert getattr(engine.calls[-1].params, of_engine) == (core.VOCAB_SIZE if n < 0 else n)
        engine.calls.clear()


async def test_the_server_asks_for_deltas(engine: FakeService, client: httpx.AsyncClient) -> None:
    for url, body in BODIES.items():
        await client.post(url, json={**body, "logprobs": None})
    assert [call.params.output_kind.name for call in engine.calls] == ["DELTA", "DELTA"]
