"""Responses that are not streams: encoded and sent in pieces, counted, and equal to the streamed chunks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Message

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import ExhaustedError, RejectedError
from llaisys.registry import ModelRegistry
from llaisys.server.completion_builder import ECHO_TOKENS
from llaisys.server.response_body import (
    PIECE_BYTES,
    SLICE_ITEMS,
    JsonList,
    JsonText,
    ResponseBytes,
    json_list,
    json_string,
    pieces,
    send_parts,
)
from llaisys.server.state import ServerState
from sse import chunks

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = [5 + i % 90 for i in range(3 * ECHO_TOKENS + 1)]


def test_lists_and_texts_grow() -> None:
    made, text = JsonList(), JsonText()
    n_bytes = sum(map(made.extend, ([], [1, None], [], ["é\ud800"], [{"a": [1]}])))
    assert json.loads(b"[" + made.data + b"]") == [1, None, "é\ud800", {"a": [1]}]
    n_bytes += sum(map(text.add, ('a"', "", "\n漢\ud800")))
    assert json.loads(b'"' + text.data + b'"') == 'a"\n漢\ud800'
    assert n_bytes == len(made.data) + len(text.data)


@pytest.mark.parametrize("sizes", [[0], [1, 0, 2], [PIECE_BYTES], [5 * PIECE_BYTES + 3, 7], [1000] * 300])
async def test_pieces_are_small_and_add_up(sizes: list[int]) -> None:
    parts = [bytes([i % 256]) * n for i, n in enumerate(sizes)]
    made = [*pieces(parts)]
    assert b"".join(made) == b"".join(parts)
    assert all(PIECE_BYTES <= len(piece) < 2 * PIECE_BYTES for piece in made[:-1])
    sent: list[Message] = []
    n_turns = 0

    async def send(message: Message) -> None:
        sent.append(message)

    async def count_turns() -> None:
        nonlocal n_turns
        while True:
            await asyncio.sleep(0)
            n_turns += 1

    counter = asyncio.ensure_future(count_turns())
    await send_parts(send, {"x": "1"}, parts)
    counter.cancel()
    assert n_turns >= len(made) - 1, "other tasks run between two pieces"
    start, *bodies = sent
    assert dict(start["headers"])[b"content-length"] == str(sum(sizes)).encode()
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False] * bool(bodies)


async def test_long_values_are_encoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = list(range(3 * SLICE_ITEMS + 1))
    text = "a\n😀" * PIECE_BYTES
    sizes: list[int] = []
    extend, add = JsonList.extend, JsonText.add
    monkeypatch.setattr(JsonList, "extend", lambda self, v: (sizes.append(len(v)), extend(self, v))[1])
    monkeypatch.setattr(JsonText, "add", lambda self, v: (sizes.append(len(v)), add(self, v))[1])
    assert json.loads(b"[" + await json_list(ids) + b"]") == ids
    assert json.loads(b'"' + await json_string(text) + b'"') == text
    assert sizes == [*[SLICE_ITEMS] * 3, 1, *[PIECE_BYTES] * 3]


def test_response_bytes_are_counted() -> None:
    made = ResponseBytes(10, 15)
    made.add(6, 0)
    made.add(4, 6)
    with pytest.raises(RejectedError, match="more than 10 bytes"):
        made.add(1, 10)
    made.add(5, 0)
    with pytest.raises(ExhaustedError, match="more than 15 bytes"):
        made.add(1, 5)
    made.remove(10)
    made.add(1, 5)
    assert made.n_in_flight == 6


def test_response_bytes_are_shared_among_clients() -> None:
    made = ResponseBytes(64, 64, n_clients=2)
    made.add(48, 0, "a")
    with pytest.raises(ExhaustedError, match="those of one client more than 48"):
        made.add(1, 48, "a")
    made.add(16, 0, "b")
    made.remove(48, "a")
    made.remove(16, "b")
    assert made.n_in_flight == 0


@pytest.fixture
def talkative(engine: FakeService) -> FakeService:
    """Return an engine with long completions."""
    engine.script = [Piece([f"word {i} "] * 10) for i in range(200)] + [Piece(["!"], "stop")]
    return engine


@pytest.mark.parametrize(("url", "fields"), [(CHAT, {"n": 2}), (COMPLETIONS, {"prompt": ["a", "b"]})])
@pytest.mark.parametrize(
    ("bounds", "status", "code"),
    [
        ({"max_response_bytes": 5000}, 400, "invalid_value"),
        ({"max_response_bytes_in_flight": 5000}, 429, "server_overloaded"),
        ({}, 200, None),
    ],
)
async def test_a_response_that_grows_too_large_fails(
    talkative: FakeService,
    make_client: Any,
    chat_body: dict[str, Any],
    url: str,
    fields: dict[str, Any],
    bounds: dict[str, int],
    status: int,
    code: str | None,
) -> None:
    if "n" in fields:
        talkative.script = [Piece(p.tokens, p.finish, index=i) for p in talkative.script for i in (0, 1)]
    state = ServerState(Config(**bounds), models=ModelRegistry([talkative]))  # type: ignore[list-item]
    async with make_client(state) as client:
        response = await client.post(url, json={**(chat_body if url == CHAT else {}), **fields})
        assert response.status_code == status
        assert response.json().get("error", {}).get("code") == code
        if code is not None:
            assert "5000 bytes" in response.json()["error"]["message"]
        stream = await client.post(url, json={**(chat_body if url == CHAT else {}), **fields, "stream": True})
        assert "error" not in stream.text, "a stream is not buffered and has no such limit"
    assert all(call.ended for call in talkative.calls)
    assert state.response_bytes.n_in_flight == 0


@pytest.mark.usefixtures("talkative")
async def test_counted_bytes_equal_sent_bytes(
    state: ServerState, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0
    add = state.response_bytes.add

    def count(n_bytes: int, n_before: int, client_id: str) -> None:
        nonlocal counted
        counted += n_bytes
        add(n_bytes, n_before, client_id)

    monkeypatch.setattr(state.response_bytes, "add", count)
    for body in (
        {"prompt": [[5, 6, 7]] * 3, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
        {"prompt": LONG, "echo": True, "logprobs": 1},
    ):
        counted = 0
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 200
        assert 0.95 < len(response.content) / counted < 1.05


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"logprobs": 0, "return_token_ids": True}])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_long_echo_is_streamed_in_chunks(
    engine: FakeService, client: httpx.AsyncClient, n: int, fields: dict[str, Any]
) -> None:
    engine.script = [Piece(["a"], "stop", index=i) for i in range(n)]
    body = {"prompt": LONG, "echo": True, "n": n, **fields}
    whole = (await client.post(COMPLETIONS, json=body)).json()["choices"]
    streamed = chunks((await client.post(COMPLETIONS, json={**body, "stream": True})).content)
    for index in range(n):
        parts = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"] == bytes(LONG).decode() + "a"
        assert parts[-1]["finish_reason"] == whole[index]["finish_reason"] == "stop"
        if "return_token_ids" in fields:
            assert (
                [id for part in parts for id in part["token_ids"]]
                == whole[index]["token_ids"]
                == [100 + index]
            )
            (ids,) = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
            assert ids == whole[index]["prompt_token_ids"] == LONG
        if "logprobs" in fields:
            sizes = [len(part["logprobs"]["tokens"]) for part in parts]
            assert max(sizes) <= ECHO_TOKENS
            assert sum(sizes) == len(LONG) + 1
            for name, values in whole[index]["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][name]] == values


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_prompt_logprobs_of_every_choice(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any], url: str
) -> None:
    engine.script = [Piece(["a"], "stop", index=i) for i in range(2)]
    base = chat_body if url == CHAT else {"prompt": LONG}
    body = (await client.post(url, json={**base, "n": 2, "prompt_logprobs": 1})).json()
    found = [body["prompt_logprobs"]] if url == CHAT else [c["prompt_logprobs"] for c in body["choices"]]
    assert len(found) == (1 if url == CHAT else 2)
    for given in found:
        assert given[0] is None
        assert len(given) == (3 if url == CHAT else len(LONG))
        assert all(len(entry) == 2 for entry in given[1:])
