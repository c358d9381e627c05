"""The benchmark client: streams of a scripted server in this process, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from llaisys.bench.http_client import Target, first_model, send, session_of
from llaisys.bench.load_generator import run_load
from llaisys.bench.request_record import RequestRecord
from llaisys.bench.workload import Turn
from llaisys.errors import RejectedError

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


def frame(value: Any, end: str = "\n\n") -> bytes:
    return b"data: " + json.dumps(value).encode() + end.encode()


def text(*pieces: str) -> list[bytes]:
    frames = [frame({"choices": [{"text": piece}]}) for piece in pieces]
    return [*frames, frame({"choices": [{"text": "", "finish_reason": "length"}]})]


class Peer:
    """Respond to each request with the next of `scripts` (status, parts of the body); record the requests."""

    def __init__(self, *scripts: tuple[int, Sequence[bytes]]) -> None:
        self.scripts = list(scripts)
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.n_open = self.n_open_max = 0

    async def reply(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        status, parts = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        response = web.StreamResponse(status=status)
        self.n_open += 1
        self.n_open_max = max(self.n_open_max, self.n_open)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)
        self.n_open -= 1
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}, {"id": "n"}]})


@contextlib.asynccontextmanager
async def running(peer: Peer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/{name:.*}", peer.reply)
    app.router.add_get("/v1/models", peer.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def record_of(peer: Peer, prompt: Any = "hello", **settings: Any) -> RequestRecord:
    record = RequestRecord(due_s=0.0)
    async with running(peer) as url:
        target = Target(base_url=url, model="m", **settings)
        async with session_of(target) as session:
            await send(session, target, prompt, 5, record)
    return record


DONE = b"data: [DONE]\n\n"


async def test_a_stream_split_at_any_position() -> None:
    raw = b"".join([b": ping\n\n", *text("a", "", "é"), frame({"choices": [], "usage": USAGE}), DONE])
    for size in (1, 2, 7, len(raw)):
        record = await record_of(Peer((200, [raw[i : i + size] for i in range(0, len(raw), size)])))
        assert record.error == ""
        assert record.text == "aé"
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 5, 4)
        assert 1 <= len(record.chunk_times_s) <= 2  # frames of one read have one arrival time
        assert record.start_s < record.first_s <= record.end_s


async def test_lines_that_end_with_cr_and_usage_in_the_last_chunk() -> None:
    last = {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": USAGE}
    record = await record_of(
        Peer((200, [frame({"choices": [{"text": "a"}]}, "\r\n\r\n"), frame(last, "\r\n\r\n")]))
    )
    assert (record.error, record.text, record.output_tokens) == ("", "ab", 5)


async def test_reasoning_counts_as_a_token_and_a_role_does_not() -> None:
    role = frame({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    parts = [
        role,
        frame({"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}),
        frame({"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}], "usage": USAGE}),
    ]
    peer = Peer((200, parts))
    record = await record_of(
        peer, backend="openai-chat", headers={"authorization": "Bearer k"}, fields={"top_k": 1}
    )
    assert record.text == "hmyes"
    (body,) = peer.bodies
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["max_completion_tokens"], body["top_k"], body["stream"]) == (5, 1, True)
    assert peer.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("status", "parts", "words"),
    [
        (
            429,
            [b'{"error": {"message": "the queue is full", "code": "server_overloaded"}}'],
            "429: the queue is full",
        ),
        (500, [b"<html>oops"], "500: <html>oops"),
        (200, [*text("a"), frame({"error": {"message": "engine dead"}}), DONE], "in the stream: engine dead"),
        (200, [*text("a"), DONE], "without usage"),
        (200, [b"data: {not json\n\n"], "JSONDecodeError"),
    ],
)
async def test_errors_are_in_the_record(status: int, parts: list[bytes], words: str) -> None:
    record = await record_of(Peer((status, parts)))
    assert words in record.error
    assert record.status == status


async def test_the_model_name_is_fetched_and_an_unreachable_address_is_named() -> None:
    async with running(Peer((200, []))) as url:
        target = Target(base_url=f"{url}/v1/")
        assert target.url == f"{url}/v1/completions"
        async with session_of(target) as session:
            assert await first_model(session, target) == "m"
    async with session_of(target) as session:
        with pytest.raises(RejectedError, match=r"cannot get a model name from .* --model"):
            await first_model(session, target)


async def test_a_conversation_includes_its_completions_and_stops_at_an_error() -> None:
    good = (200, [*text("yes"), frame({"choices": [], "usage": USAGE})])
    peer = Peer(good, (500, [b"no"]), good)
    async with running(peer) as url:
        target = Target(base_url=url, backend="openai-chat", model="m")
        async with session_of(target) as session:
            run = await run_load(session, target, [tuple(Turn(w, 5) for w in ("one", "two", "three"))], [0.0])
    assert [record.error for record in run.records] == ["", "500: no"]
    assert [message["content"] for message in peer.bodies[1]["messages"]] == ["one", "yes", "two"]


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (None, 12)])
async def test_concurrency_is_bounded(limit: int | None, most: int) -> None:
    peer = Peer((200, [*text(*"abcdefgh"), frame({"choices": [], "usage": USAGE})]))
    ended = []
    async with running(peer) as url:
        target = Target(base_url=url, model="m")
        async with session_of(target) as session:
            conversations = [(Turn([1, 2], 5),)] * 12
            run = await run_load(session, target, conversations, [0.0] * 12, limit, lambda: ended.append(1))
    assert [record.error for record in run.records] == [""] * 12
    assert 1 <= peer.n_open_max <= most
    assert len(ended) == 12
    assert set(run.overhead.report()) >= {"cpu_share", "loop_lag_p99_ms", "send_lag_p99_ms", "limited"}
