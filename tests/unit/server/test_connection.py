"""Connections of a real server on a real socket: rejected input, parsing limits, eviction and half-close.

The application is small, so that a test can block it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from llaisys.config import Config
from llaisys.server import connection
from llaisys.server.connection import (
    CONTINUE,
    EVENTS_PER_END,
    EVENTS_PER_HEAD,
    EVENTS_PER_ITERATION,
    HEADERS_MAX,
    INPUT_BYTES_MAX,
    Connection,
    connection_class,
)
from llaisys.server.lifecycle import _Uvicorn
from llaisys.server.listener import ConnectionStats, Listener, bind
from llaisys.server.middleware.rate_limits import OpenRequestLimitMiddleware
from llaisys.server.stream_writer import BodyWriter, body_writer_of
from waiting import until

HEAD = b"POST /%s HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD % b"echo" + b"Transfer-Encoding: chunked\r\n\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = LIVEZ.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")


@dataclass
class App:
    """`/echo` sends the body back once it is whole, `/wait` and `/stream` respond (again) at each `go`.

    `/pieces` writes a body past the middleware; `written` has what the writer returned. `bodies` has the
    iteration of the event loop in which each body was whole, for a test that counts `iteration`.
    """

    go: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    seen: asyncio.Queue[str] = field(default_factory=asyncio.Queue)  # a path, then `gone` after a disconnect
    written: list[bool] = field(default_factory=list)
    bodies: list[int] = field(default_factory=list)
    iteration: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.put_nowait(scope["path"])
        if scope["path"] == "/early":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        message: Message = {"more_body": True}
        body = b""
        while message.get("more_body") and message.get("type") != "http.disconnect":
            message = await receive()
            body += message.get("body", b"")
        self.bodies.append(self.iteration)
        if scope["path"] == "/pieces":
            await self._write_pieces(body_writer_of(scope), send)
            return
        if scope["path"] in ("/wait", "/stream"):
            gone = asyncio.ensure_future(self._watch(receive))
            if scope["path"] == "/stream":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while not gone.done():
                    await send({"type": "http.response.body", "body": b"x", "more_body": True})
                    await asyncio.wait(
                        {gone, go := asyncio.ensure_future(self.go.get())}, return_when="FIRST_COMPLETED"
                    )
                    go.cancel()
                return
            await asyncio.wait({gone, asyncio.ensure_future(self.go.get())}, return_when="FIRST_COMPLETED")
            gone.cancel()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(body))],
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def _write_pieces(self, write: BodyWriter, send: Send) -> None:
        """Write pieces with both ways in turn, then as many as are accepted, and begin and end with one too
        many."""
        self.written.append(write(b"before"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.written.append(write(b"one"))
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        self.written.append(write(b"three"))
        await self.go.get()
        while self.go.qsize() and write(bytes(1024)):
            self.written.append(True)
        self.written.append(False)
        await send({"type": "http.response.body", "body": b""})
        self.written.append(write(b"after"))
        self.seen.put_nowait("ended")

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.seen.put_nowait("gone")


@dataclass
class Served:
    """A running server."""

    app: App
    listener: Listener
    http: type[Connection]
    web: uvicorn.Server

    @property
    def stats(self) -> ConnectionStats:
        return self.listener.limit.stats

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.listener.getsockname())

    async def responses(self, *parts: bytes, half_close: bool = False) -> bytes:
        """Return all bytes received on one connection until the server closes it."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
        if half_close:
            writer.write_eof()
        raw = await reader.read()
        writer.close()
        return raw


@asynccontextmanager
async def serving(
    maximum: int = 64, requests: int = 32, served_app: ASGIApp | None = None, **tls: Any
) -> AsyncIterator[Served]:
    app = App()
    with bind(Config(port=0)) as listener:
        listener.limit.maximum = maximum
        # No timeout ends a connection: a loaded machine may take long for any test.
        http = connection_class(3600.0, listener.limit)
        bound = OpenRequestLimitMiddleware(served_app or app, listener.limit.stats, requests)
        config = uvicorn.Config(
            bound, http=http, ws="none", lifespan="off", log_config=None, timeout_keep_alive=3600, **tls
        )
        config.load()
        web = _Uvicorn(config)
        web.lifespan = config.lifespan_class(config)
        await web.startup([listener])
        yield Served(app, listener, http, web)
        for server in web.servers:
            server.close()
        for each in [*web.server_state.connections]:
            each.transport.abort()
        await until(lambda: not web.server_state.connections and not web.server_state.tasks)


@pytest.fixture(autouse=True)
def _short_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HALF_CLOSED_POLL_S", 0.01)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as made:
        yield made


def rejection(raw: bytes) -> tuple[int, str]:
    """Return status and message of the last response, which must close the connection and be an API error."""
    head, _, body = raw.rpartition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return int(head[head.rindex(b"HTTP/1.1") :].split()[1]), error["message"]


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 28_000 + b"\r\n", 431, "larger than 32768 bytes"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * HEADERS_MAX + b"\r\n", 431, "more than 100 headers"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 40_000 + b"\r\n\r\n", 431, "larger than 32768 bytes"),
        (b"GET /" + b"x" * 3_000_000, 431, "larger than 32768 bytes"),
        (HEAD % b"echo" + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "not both"),
        (
            HEAD % b"echo" + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
            400,
            "conflicting Content-Length",
        ),
        (HEAD % b"echo" + b"Transfer-Encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (b"nonsense\r\n\r\n", 400, "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01", 400, "illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (CHUNKED + b"1\r\na\r\n" * 10_000, 400, "too small"),
        (CHUNKED + b"1;" + b"x" * 30_000 + b"\r\na\r\n", 400, "too small"),
        (CHUNKED + b"1\r\na\r\n0\r\n" + b"a:\r\n" * 20_000 + b"\r\n", 400, "too small"),
        (CHUNKED + b"x\r\n", 400, "illegal chunk header"),
    ],
)
async def test_rejected_input_gets_a_json_error_and_closes_the_connection(
    served: Served, sent: bytes, status: int, words: str
) -> None:
    found, message = rejection(await served.responses(sent))
    assert (found, words in message) == (status, True), message
    assert served.stats.bad_requests == 1
    assert served.stats.headers <= 3, "oversized input is rejected before it is parsed"


async def test_the_largest_allowed_head_is_accepted(served: Served) -> None:
    lines = b"".join(b"a%d: %s\r\n" % (i, b"x" * 300) for i in range(HEADERS_MAX - 3))
    head = HEAD % b"echo" + lines + b"Connection: close\r\nContent-Length: 2\r\n\r\n"
    assert (await served.responses(head + b"{}")).endswith(b"\r\n\r\n{}")
    assert served.stats.headers == HEADERS_MAX


async def test_a_rejection_after_a_response_sends_no_second_response(served: Served) -> None:
    """The application responds without reading the body; later the body is not valid chunks."""
    reader, writer = await served.connect()
    writer.write(CHUNKED.replace(b"echo", b"early"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.write(b"no chunk\r\n")
    assert await reader.read() == b""
    writer.close()
    assert served.stats.bad_requests == 1


@pytest.mark.parametrize("size", [97, 2048, 2049, 5000])
async def test_a_body_does_not_depend_on_packet_boundaries(served: Served, size: int) -> None:
    """Pipelined chunked bodies with empty lines in their content, cut at any position."""
    content = b"".join(b"%d\n\n\r\n\r\n" % i for i in range(2000))
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(piece), piece)
        for piece in (content[i : i + 999] for i in range(0, len(content), 999))
    )
    request = CHUNKED + chunks + b"0\r\nTrailer: x\r\n\r\n"
    sent = request * 2 + LAST
    reader, writer = await served.connect()
    for start in range(0, len(sent), size):
        writer.write(sent[start : start + size])
        await writer.drain()
        await asyncio.sleep(0)
    raw = await reader.read()
    assert raw.count(b"HTTP/1.1 200 OK") == 3
    assert raw.count(content) == 2
    writer.close()


async def test_one_iteration_of_the_loop_parses_a_bounded_number_of_events(served: Served) -> None:
    """Sixteen concurrent clients send pipelined requests and chunks of the smallest allowed size."""
    chunks = CHUNKED + b"6\r\nabcdef\r\n" * 3000 + b"0\r\n\r\n" + LAST
    sent = [LIVEZ * 200 + LAST, chunks] * 8
    raws = await asyncio.gather(*(served.responses(each) for each in sent))
    assert [raw.count(b"HTTP/1.1 200 OK") for raw in raws] == [201, 2] * 8
    assert served.stats.events > 8 * (201 * (EVENTS_PER_HEAD + EVENTS_PER_END) + 3000)
    # The last piece of an iteration may exceed the bound: 2 KiB of one-byte chunks are 342 events.
    assert EVENTS_PER_ITERATION <= served.http.queue.max_events <= EVENTS_PER_ITERATION + 342


async def test_few_tasks_continue_in_one_iteration_of_the_loop(served: Served) -> None:
    """The bodies of 24 requests arrive at the same time, after their heads."""

    async def count() -> None:
        while True:
            served.app.iteration += 1
            await asyncio.sleep(0)

    writers = [(await served.connect())[1] for _ in range(24)]
    for writer in writers:
        writer.write(HEAD % b"echo" + b"Content-Length: 1\r\n\r\n")
    for _ in writers:
        await served.app.seen.get()
    counter = asyncio.create_task(count())
    for writer in writers:
        writer.write(b"x")
    await until(lambda: len(served.app.bodies) == len(writers))
    counter.cancel()
    by_iteration = Counter(served.app.bodies)
    assert max(by_iteration.values()) <= EVENTS_PER_ITERATION // EVENTS_PER_END, by_iteration
    for writer in writers:
        writer.transport.abort()


async def test_pieces_are_written_past_the_middleware_as_h11_writes_them(served: Served) -> None:
    reader, writer = await served.connect()
    writer.write(HEAD % b"pieces" + b"Content-Length: 0\r\n\r\n")
    served.app.go.put_nowait(None)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    body = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
    assert served.app.written == [False, True, True, False, False]
    writer.write(LAST)  # h11 is ready for the next request
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_http_1_0_has_no_pieces(served: Served) -> None:
    served.app.go.put_nowait(None)
    request = (HEAD % b"pieces").replace(b"1.1", b"1.0") + b"Content-Length: 0\r\n\r\n"
    assert (await served.responses(request)).endswith(b"\r\n\r\ntwo")
    assert not any(served.app.written)


async def test_pieces_for_a_client_that_does_not_read_are_refused(served: Served) -> None:
    """Like messages, they wait above the transport's limit. Once the client has gone, all are refused."""
    _, writer = await served.connect()
    writer.transport.pause_reading()
    writer.write(HEAD % b"pieces" + b"Content-Length: 0\r\n\r\n")
    assert await served.app.seen.get() == "/pieces"
    (open_,) = served.web.server_state.connections
    for _ in range(2):  # the second one lets it write until it is refused
        served.app.go.put_nowait(None)
    await until(lambda: served.app.written.count(False) == 2)
    assert open_.transport.get_write_buffer_size() <= HIGH_WATER_LIMIT + 2048
    writer.transport.abort()
    assert await served.app.seen.get() == "ended"
    assert served.app.written[-1] is False


async def test_streams_leave_nothing_for_the_garbage_collector(app: ASGIApp) -> None:
    """Full collections stop all streams. Cycles of references would leave the objects of each request to
    them."""
    body = b'{"prompt": "Hi", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving(served_app=app) as served:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert b"[DONE]" in await served.responses(head + kind + body)
            await until(lambda: not served.web.server_state.connections and not served.web.server_state.tasks)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = {type(each).__name__ for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left & {"Connection", "RequestResponseCycle", "CompletionResponse", "StreamWriter", "Task"}


async def test_input_behind_an_open_request_stays_in_the_kernel(served: Served) -> None:
    """A client keeps sending during an open request: the server reads its limit and at most 256 KiB more."""
    _, writer = await served.connect()
    writer.write(HEAD % b"wait" + b"Content-Length: 0\r\n\r\n")
    assert await served.app.seen.get() == "/wait"
    (open_,) = served.web.server_state.connections
    writer.write(LIVEZ * 100_000)
    await until(lambda: open_.flow._is_input_full)  # type: ignore[union-attr]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(open_._received) <= INPUT_BYTES_MAX + 256 * 1024  # type: ignore[union-attr]  # a Connection
    writer.transport.abort()


async def test_idle_connections_are_evicted_for_new_ones(served: Served) -> None:
    """Connections without a request are evicted first, oldest first, then idle ones. Open requests stay."""
    waiting = await served.connect()
    waiting[1].write(HEAD % b"wait" + b"Content-Length: 1\r\n\r\nx")
    assert await served.app.seen.get() == "/wait"
    kept = await served.connect()
    kept[1].write(LIVEZ)
    await kept[0].readuntil(b"\r\n\r\n")
    idle = [await served.connect() for _ in range(62)]
    assert served.stats.evicted == 0
    more = [await served.connect() for _ in range(30)]
    assert [await reader.read() for reader, _ in idle[:30]] == [b""] * 30
    more[0][1].write(LIVEZ)  # a probe among them gets a response
    assert (await more[0][0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    more += [await served.connect() for _ in range(61)]  # evicts all others that have sent nothing
    assert [await reader.read() for reader, _ in idle[30:] + more[1:30]] == [b""] * 61
    more += [await served.connect() for _ in range(62)]
    assert served.stats.evicted == 153
    served.app.go.put_nowait(None)
    assert (await waiting[0].readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200 OK")
    assert served.stats.refused == 0
    for _, writer in [waiting, kept, *idle, *more]:
        writer.close()


async def test_connections_without_a_finished_handshake_are_evicted(tmp_path: Path) -> None:
    """They count from `accept` on, before an HTTP connection exists."""
    authority = trustme.CA()
    pem = tmp_path / "cert.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving(maximum=8, ssl_certfile=pem) as served:
        silent = [await served.connect() for _ in range(8)]
        reader, writer = await asyncio.open_connection(*served.listener.getsockname(), ssl=context)
        writer.write(LAST)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        assert await silent[0][0].read() == b""
        assert served.stats.evicted == 1
        for _, each in [(reader, writer), *silent]:
            each.transport.abort()


async def test_connections_above_the_limit_are_closed_if_all_are_busy() -> None:
    """A probe is still accepted before that, because open requests have a lower limit."""
    async with serving(maximum=8, requests=6) as served:
        busy = [await served.connect() for _ in range(6)]
        for _, writer in busy:
            writer.write(HEAD % b"wait" + b"Content-Length: 1\r\n\r\nx")
            assert await served.app.seen.get() == "/wait"
        raw = await served.responses(HEAD % b"echo" + b"Content-Length: 0\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in raw
        assert json.loads(raw.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "server_overloaded"
        probes = [await served.connect() for _ in range(2)]
        for _, writer in probes:
            writer.write(HEAD % b"livez" + b"Content-Length: 1\r\n\r\n")  # stays open: the body never arrives
            assert await served.app.seen.get() == "/livez"
        for _ in range(3):
            reader, writer = await served.connect()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert (served.stats.refused, served.stats.evicted, served.stats.requests_refused) == (3, 0, 1)
        for _, writer in busy + probes:
            writer.transport.abort()
        await until(lambda: not served.web.server_state.tasks)
        assert (await served.responses(LAST)).startswith(b"HTTP/1.1 200 OK")


async def test_a_client_that_half_closes_gets_its_whole_response(served: Served) -> None:
    request = HEAD % b"echo" + b"Content-Length: 300000\r\n\r\n" + b"y" * 300_000
    raw = await served.responses(request + CHUNKED + b"1\r\nz\r\n0\r\n\r\n", half_close=True)
    assert raw.count(b"HTTP/1.1 200 OK") == 2
    assert (raw.count(b"y" * 300_000), raw.endswith(b"\r\n\r\nz")) == (1, True)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP", HEAD % b"echo" + b"Content-Length: 9\r\n\r\nx"])
async def test_a_partial_request_before_a_half_close_is_dropped(served: Served, sent: bytes) -> None:
    assert await served.responses(sent, half_close=True) == b""


async def test_a_half_closed_client_is_probed_once(served: Served) -> None:
    """The server sends `100 Continue` before a slow response, and then the whole response."""
    reader, writer = await served.connect()
    writer.write(HEAD % b"wait" + b"Content-Length: 2\r\n\r\n{}")
    writer.write_eof()
    assert await reader.readuntil(b"\r\n\r\n") == CONTINUE
    served.app.go.put_nowait(None)
    raw = await reader.read()
    assert (raw.startswith(b"HTTP/1.1 200 OK"), raw.endswith(b"\r\n\r\n{}")) == (True, True)
    writer.close()


@pytest.mark.parametrize("path", ["/wait", "/stream"])
@pytest.mark.parametrize("is_reset", [True, False])
async def test_a_closed_or_reset_connection_ends_its_request(
    served: Served, path: str, is_reset: bool
) -> None:
    """A close looks like a half-close until the server writes."""
    reader, writer = await served.connect()
    writer.write(HEAD % path[1:].encode() + b"Content-Length: 2\r\n\r\n{}")
    assert await served.app.seen.get() == path
    if path == "/stream":
        await reader.readuntil(b"x")
    if is_reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    seen = asyncio.ensure_future(served.app.seen.get())

    def is_seen() -> bool:
        if path == "/stream" and not is_reset:
            served.app.go.put_nowait(None)  # only a write reveals the close
        return seen.done()

    await until(is_seen)
    assert seen.result() == "gone"
