"""How the gateway relays a response, and ends it if the replica is lost; the pipe on the replica's side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import RayActorError
from starlette.types import Message, Receive, Scope, Send

from llaisys.ray.exchange import MESSAGES_MAX, AsgiPipe
from llaisys.ray.gateway import Relay
from llaisys.server.http_errors import ApiError
from sse import events, named_events
from waiting import until

HEAD = {"type": "http.response.start", "status": 200}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def relayed(path: str, *messages: Message) -> list[Message]:
    """Return what a client gets of a replica that dies after these messages."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def replica() -> AsyncIterator[list[dict[str, Any]]]:
        for message in messages:
            yield [dict(message)]
        raise RayActorError

    await Relay({"type": "http", "path": path}, send).run(replica())
    return sent


def body(sent: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


async def test_a_response_that_has_not_begun_becomes_a_503() -> None:
    start, end = await relayed("/v1/chat/completions")
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(end["body"])["error"]["code"] == "engine_dead"


async def test_a_stream_ends_with_an_error_in_its_format() -> None:
    head = {**HEAD, "headers": EVENTS}
    first = {"type": "http.response.body", "body": b'data: {"a": 1}\n\n', "more_body": True}
    sent = await relayed("/v1/chat/completions", head, first)
    assert events(body(sent))[0] == {"a": 1}
    assert events(body(sent))[1]["error"]["code"] == "engine_dead"
    assert events(body(sent))[2:] == ["[DONE]"]
    assert not sent[-1].get("more_body")


async def test_a_stream_of_messages_ends_with_anthropics_error() -> None:
    sent = await relayed("/v1/messages", {**HEAD, "headers": EVENTS})
    (event,) = named_events(body(sent))
    assert event["error"]["type"] == "overloaded_error"


async def test_a_stream_of_a_response_ends_with_a_numbered_error() -> None:
    """An event's name within a text is not counted."""
    two = (
        b'event: x\ndata: {"type": "x", "text": "\\nevent: "}\n\n: ping\n\nevent: y\ndata: {"type": "y"}\n\n'
    )
    message = {"type": "http.response.body", "body": two, "more_body": True}
    sent = await relayed("/v1/responses", {**HEAD, "headers": EVENTS}, message)
    assert [event["type"] for event in named_events(body(sent))] == ["x", "y", "error"]
    assert named_events(body(sent))[2]["sequence_number"] == 2


async def test_ollamas_stream_ends_with_an_error_line() -> None:
    head = {**HEAD, "headers": [(b"content-type", b"application/x-ndjson")]}
    assert "error" in json.loads(body(await relayed("/api/chat", head)))


async def test_a_body_that_is_cut_has_no_regular_end() -> None:
    head = {**HEAD, "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ApiError):
        await relayed("/v1/models", head, {"type": "http.response.body", "body": b"{", "more_body": True})


async def run(app: Any, pipe: AsgiPipe) -> None:
    await app({"type": "http"}, pipe.receive, pipe.send)
    await pipe.finish()


async def test_the_pipe_yields_all_messages_in_order() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 -- ASGI's signature
        got = await receive()
        for i in range(3 * MESSAGES_MAX):
            await send({"type": "http.response.body", "body": got["body"] + b"%d" % i})

    pipe = AsgiPipe(b"n")
    work = asyncio.ensure_future(run(app, pipe))
    found = [message["body"] async for messages in pipe for message in messages]
    await work
    assert found == [b"n%d" % i for i in range(3 * MESSAGES_MAX)]


async def test_an_application_waits_for_a_slow_reader_and_ends_when_it_leaves() -> None:
    n_sent, ends = 0, []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 -- ASGI's signature
        nonlocal n_sent
        await receive()
        while n_sent < 2 * MESSAGES_MAX:
            await send({"type": "http.response.body"})
            n_sent += 1
        ends.append(await receive())

    pipe = AsgiPipe(b"")
    work = asyncio.ensure_future(run(app, pipe))
    await until(lambda: n_sent == MESSAGES_MAX)
    for _ in range(20):
        await asyncio.sleep(0)
    assert n_sent == MESSAGES_MAX
    await pipe.close()
    await work
    assert ends == [{"type": "http.disconnect"}]
