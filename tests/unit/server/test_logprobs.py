"""Numbers of logprobs in a body: -1 is the whole vocabulary, and `max_logprobs` is the limit."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from fakes import core
from fakes.service import FakeService
from llaisys.config import Config
from llaisys.outputs import Logprob
from llaisys.server.completion_builder import chat_logprobs
from llaisys.server.logprobs import tokens_per_chunk

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


async def test_requested_ids_take_the_place_of_the_best(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    """The number of best candidates has no effect, and the order is by logprob."""
    for n in (0, 5):
        body = {**BODIES[CHAT], "top_logprobs": n, "logprob_token_ids": [7, 101, 3]}
        made = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
        tokens = [[each["token"] for each in entry["top_logprobs"]] for entry in made]
        assert tokens == [["<3>", *own, "<7>", *last] for own, last in EXPECTED]
        assert [entry["logprob"] for entry in made] == [-1.0, -1.0, -1.0]
        body = {**BODIES[COMPLETIONS], "logprobs": n, "logprob_token_ids": [7, 101, 3]}
        made = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
        assert [list(top) for top in made["top_logprobs"]] == tokens
    assert {call.params.logprobs for call in engine.calls} == {3}


EXPECTED = [(["Hel"], ["<101>"]), (["lo"], []), (["!"], ["<101>"])]


async def test_an_echoed_prompt_keeps_its_best_candidates(client: httpx.AsyncClient) -> None:
    body = {**BODIES[COMPLETIONS], "echo": True, "logprobs": 1, "logprob_token_ids": [7, 3]}
    made = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["logprobs"]
    assert made["top_logprobs"][1:3] == [
        {"best": -0.5, "<105>": -1.0},
        {"<3>": -0.75, "Hel": -1.0, "<7>": -1.75},
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"logprobs": None, "logprob_token_ids": [3]}, "needs logprobs"),
        ({"logprob_token_ids": [-3]}, "is -3"),
        ({"logprob_token_ids": 3}, "valid list"),
        ({"logprob_token_ids": ["a"]}, "valid integer"),
    ],
)
async def test_wrong_requested_ids_are_refused_by_name(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any], says: str
) -> None:
    for url, base in BODIES.items():
        response = await client.post(url, json={**base, "logprobs": url == CHAT or 1, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"].split("[")[0]) == (400, "logprob_token_ids")
        assert says in error["message"]
    assert not engine.calls


@pytest.mark.parametrize(("n_ids", "on_thread"), [(20, False), (30, True)])
@pytest.mark.parametrize("stream", [False, True])
async def test_many_logprobs_are_written_on_a_thread(
    engine: FakeService,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    n_ids: int,
    on_thread: bool,
    stream: bool,
) -> None:
    threads: set[int] = set()

    def write(*given: Any, **options: Any) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return chat_logprobs(*given, **options)

    monkeypatch.setattr("llaisys.server.routes.chat.chat_logprobs", write)
    engine.config = Config(max_logprobs=-1)
    body = {**BODIES[CHAT], "stream": stream, "logprob_token_ids": list(range(n_ids))}
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200
    assert response.text.count("top_logprobs") == 3
    assert threads
    assert (threading.get_ident() not in threads) == on_thread


async def test_the_server_asks_for_deltas(engine: FakeService, client: httpx.AsyncClient) -> None:
    for url, body in BODIES.items():
        await client.post(url, json={**body, "logprobs": None})
    assert [call.params.output_kind.name for call in engine.calls] == ["DELTA", "DELTA"]


@pytest.mark.parametrize(("n_entries", "n_tokens"), [(1, 64), (21, 64), (1000, 4), (49_152, 1)])
def test_chunks_have_a_bounded_number_of_entries(n_entries: int, n_tokens: int) -> None:
    given = [None, dict.fromkeys(range(n_entries), Logprob(-1.0))]
    assert tokens_per_chunk(given, 64) == n_tokens
    assert tokens_per_chunk(given[:1], 64) == tokens_per_chunk([], 64) == 64


@pytest.mark.parametrize("body", [{"prompt_logprobs": -1}, {"echo": True, "logprobs": -1}])
async def test_chunks_join_to_the_whole_list(
    engine: FakeService, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    engine.config = Config(max_logprobs=-1)
    for url in (COMPLETIONS, CHAT) if "echo" not in body else (COMPLETIONS,):
        responses = []
        for n_entries in (1, 10**6):
            monkeypatch.setattr("llaisys.server.logprobs.ENTRIES_PER_CHUNK", n_entries)
            whole = (await client.post(url, json={**BODIES[url], **body, "request_id": "a"})).json()
            responses.append({**whole, "created": 0})
        assert responses[0] == responses[1]
