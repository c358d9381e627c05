"""The writer of event streams: status, pings, stalled clients, and exactly one terminator."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from llaisys.server.stream_writer import DATA_EVENTS, SMALL_BYTES, StreamFormat, StreamWriter, named_frame
from waiting import until

ERROR = {"error": {"code": "engine_dead"}}


class Client:
    """Collects sent messages. If `closed` is set, the next body blocks like a client that does not read."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.news = asyncio.Event()
        self.hangs = False
        self.stall_s = 30.0
        self.stalled = asyncio.Event()
        self.accepts = False  # pieces that are written at once

    def write_now(self, data: bytes) -> bool:
        if self.accepts:
            self.sent.append({"type": "piece", "body": data})
            self.news.set()
        return self.accepts

    async def send(self, message: Message) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        self.sent.append(message)
        self.news.set()

    def writer(self) -> StreamWriter:
        return StreamWriter(
            self.send,
            DATA_EVENTS,
            {"x-extra": "1"},
            [{"opening": 1}],
            self.stalled.set,
            self.stall_s,
            self.write_now,
        )

    def raw(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
async def client() -> Client:
    return Client()


async def test_headers_are_sent_with_the_first_frame(client: Client) -> None:
    writer = client.writer()
    assert client.sent == []
    await writer.frames([{"a": 1}, {"b": "天"}])
    assert client.sent[0]["status"] == 200
    assert (b"x-extra", b"1") in client.sent[0]["headers"]
    assert client.raw().decode() == 'data: {"opening":1}\n\ndata: {"a":1}\n\ndata: {"b":"天"}\n\n'
    await writer.finish([{"c": 1}])
    assert client.raw().endswith(b'data: {"c":1}\n\ndata: [DONE]\n\n')
    assert client.sent[-1]["more_body"] is False


async def test_small_frames_are_written_at_once_if_the_client_reads(client: Client) -> None:
    """Large frames, refused ones and the end are messages."""
    writer = client.writer()
    await writer.frames([])
    for client.accepts, size in ((True, 1), (True, SMALL_BYTES), (False, 1), (True, 2)):
        await writer.frames([{"a": "x" * size}])
    await writer.finish([])
    kinds = [(message["type"], len(message.get("body", b""))) for message in client.sent[2:]]
    body = "http.response.body"
    assert kinds == [
        ("piece", 17),
        (body, SMALL_BYTES + 16),
        (body, 0),
        (body, 17),
        ("piece", 18),
        (body, 14),
    ]


async def test_pings_are_written_at_once_if_the_client_reads(client: Client) -> None:
    writer = client.writer()
    client.accepts = True
    keeper = asyncio.create_task(writer.keep_alive(headers_wait_s=0, ping_interval_s=0))
    await until(lambda: client.raw().count(b": ping\n\n") >= 3)
    assert [message["type"] for message in client.sent[1:]] == ["piece"] * (len(client.sent) - 1)
    keeper.cancel()


async def test_nothing_is_sent_after_the_terminator(client: Client) -> None:
    writer = client.writer()
    await writer.finish([])
    n_sent = len(client.sent)
    await writer.finish([])
    await writer.frames([{"late": 1}])
    assert await writer.fail([ERROR])
    assert len(client.sent) == n_sent
    assert client.raw().count(b"[DONE]") == 1


async def test_an_error_before_the_first_frame_leaves_the_response_to_the_caller(client: Client) -> None:
    writer = client.writer()
    assert not await writer.fail([ERROR])
    await writer.frames([{"late": 1}])
    assert await writer.fail([ERROR])
    assert client.sent == []


async def test_a_later_error_is_a_frame_and_the_terminator(client: Client) -> None:
    writer = client.writer()
    await writer.frames([{"a": 1}])
    assert await writer.fail([ERROR])
    assert client.raw().endswith(b'"code":"engine_dead"}}\n\ndata: [DONE]\n\n')


async def test_pings_are_sent_while_there_is_no_output(client: Client) -> None:
    writer = client.writer()
    keeper = asyncio.create_task(writer.keep_alive(headers_wait_s=0, ping_interval_s=0))
    while client.raw().count(b": ping\n\n") < 3:
        client.news.clear()
        await client.news.wait()
    assert client.sent[0]["status"] == 200
    assert client.raw().startswith(b'data: {"opening":1}\n\n: ping\n\n')
    await writer.finish([])
    n_sent = len(client.sent)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(client.sent) == n_sent
    keeper.cancel()


async def test_no_ping_before_the_ping_interval(client: Client) -> None:
    writer = client.writer()
    keeper = asyncio.create_task(writer.keep_alive(headers_wait_s=0, ping_interval_s=3600))
    await client.news.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert b"ping" not in client.raw()
    keeper.cancel()


async def test_a_client_that_stops_reading_times_out(client: Client) -> None:
    client.stall_s = 0.0
    writer = client.writer()
    await writer.frames([{"a": 1}])
    client.hangs = True
    stuck = asyncio.create_task(writer.frames([{"b": 1}]))
    await client.stalled.wait()
    assert not stuck.done()
    stuck.cancel()


async def test_a_format_states_the_type_the_frames_and_the_end(client: Client) -> None:
    named = StreamFormat("text/event-stream", named_frame, ping=b"", terminator=b"")
    writer = StreamWriter(client.send, named, {}, [{"type": "open"}], client.stalled.set, client.stall_s)
    await writer.frames([{"type": "delta", "text": "a"}])
    await writer.finish([{"type": "end"}])
    assert (b"content-type", b"text/event-stream") in client.sent[0]["headers"]
    assert client.raw() == (
        b'event: open\ndata: {"type":"open"}\n\n'
        b'event: delta\ndata: {"type":"delta","text":"a"}\n\n'
        b'event: end\ndata: {"type":"end"}\n\n'
    )
    assert client.sent[-1]["more_body"] is False
