"""Connection: uvicorn's HTTP connection with bounded parsing, timeouts and support for half-closed clients.

Bytes from clients are bounded before they are parsed. One iteration of the event loop parses a bounded number
of events over all connections.
"""

from __future__ import annotations

import asyncio
import logging
import re
import select
import weakref
from collections import deque
from http import HTTPStatus
from typing import Protocol

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from llaisys.server.http_errors import ApiError, to_json
from llaisys.server.listener import ConnectionLimit
from llaisys.server.stream_writer import BODY_WRITER

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100
# Bytes of framing (sizes, extensions, trailers) that a chunked body may have in addition to those of its
# content.
FRAMING_BYTES_MAX = 16 * 1024
# Bytes passed to the parser in one call. A chunk may have one byte, which is six with its framing.
CHUNKED_PIECE_BYTES, BODY_PIECE_BYTES = 2 * 1024, 64 * 1024
# About 3 ms of h11 (5 us per event). The head of a request counts as more, for the task that it starts, and
# the end of its body as still more, because the task then does most of its work.
EVENTS_PER_ITERATION, EVENTS_PER_HEAD, EVENTS_PER_END = 512, 64, 128
BLANK_LINE = re.compile(rb"\n\r?\n")  # as h11 finds the end of a head
# Bytes that are received but not parsed; more stay in the kernel. One read of asyncio (256 KiB) may be added.
INPUT_BYTES_MAX = 64 * 1024
# A rejected client may continue to send. Closing the connection at once would lose the error response.
LINGER_S, LINGER_BYTES_MAX = 2.0, 1024 * 1024
# Interval at which a half-closed connection is checked, and delay before the client is probed.
HALF_CLOSED_POLL_S = 0.5
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("llaisys.connections")


class BoundError(Exception):
    """A request that exceeds a bound, with the HTTP status for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestParser(h11.Connection):
    """An h11 connection that gets bytes up to the next boundary only, after checking them, and counts
    events."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self.n_events = 0
        self.n_headers = 0
        self.error = BoundError(400, "")  # why h11 rejected its input
        self._n_searched = 0  # bytes already searched for the end of a head
        self._length_left: int | None = None  # of a body of known length
        self._last_bytes = b""  # of a chunked body: an empty line may begin there
        self._n_excess = 0  # bytes of framing of a chunked body, minus those of its content

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return h11's next event. Also rejects a request with two lengths."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as e:
            # Use the first part of h11's text only, because the rest repeats what the client sent.
            self.error = BoundError(e.error_status_hint, f"Invalid HTTP: {str(e).partition(':')[0]}.")
            raise
        if isinstance(event, h11.Request):
            self._begin_body(event)
            self.n_headers += len(event.headers)
            self.n_events += EVENTS_PER_HEAD + len(event.headers)
        elif isinstance(event, h11.EndOfMessage):
            self.n_events += EVENTS_PER_END
        elif isinstance(event, h11.Data):
            self.n_events += 1
            if self._length_left is None:
                self._n_excess -= 2 * len(event.data)
            else:
                self._length_left -= len(event.data)
        return event

    def feed(self, received: bytearray) -> bool:
        """Move the bytes up to the next boundary into h11; return False if more must arrive first.

        A boundary is the end of a head or of a body, so that h11 never has bytes of the next request. Raises
        BoundError for a head or a body that exceeds its bounds.
        """
        n_bytes = 0
        if self.their_state is h11.IDLE:
            n_bytes = self._head_bytes(received)
        elif self.their_state is h11.SEND_BODY:
            n_bytes = self._body_bytes(received)
        elif self.their_state in (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR):
            received.clear()  # after the last request of this connection
        if not n_bytes:
            return False
        self.receive_data(bytes(received[:n_bytes]))
        del received[:n_bytes]
        return True

    def _head_bytes(self, received: bytearray) -> int:
        end = BLANK_LINE.search(received, max(0, self._n_searched - 2), HEAD_BYTES_MAX)
        n_bytes = min(len(received), HEAD_BYTES_MAX) if end is None else end.end()
        if end is None and n_bytes == HEAD_BYTES_MAX:
            raise BoundError(431, f"The request head is larger than {HEAD_BYTES_MAX} bytes.")
        # In addition to the headers there are the request line and the empty line.
        if received.count(b"\n", 0, n_bytes) > HEADERS_MAX + 2:
            raise BoundError(431, f"The request has more than {HEADERS_MAX} headers.")
        # h11 rejects input that begins with a control character at once. It may be TLS, which has no lines.
        is_invalid = bool(received) and received[0] < 0x21
        self._n_searched = 0 if end is not None else n_bytes
        return n_bytes if end is not None or is_invalid else 0

    def _body_bytes(self, received: bytearray) -> int:
        if self._length_left is not None:
            return min(len(received), BODY_PIECE_BYTES, self._length_left)
        if self._n_excess > FRAMING_BYTES_MAX:
            raise BoundError(400, "The chunks of the request body are too small; send larger ones.")
        piece = self._last_bytes + received[:CHUNKED_PIECE_BYTES]
        end = BLANK_LINE.search(piece)
        n_bytes = (len(piece) if end is None else end.end()) - len(self._last_bytes)
        self._last_bytes = piece[-2:] if end is None else b""
        self._n_excess += n_bytes
        return n_bytes

    def _begin_body(self, request: h11.Request) -> None:
        lengths = [value for name, value in request.headers if name == b"content-length"]
        is_chunked = any(name == b"transfer-encoding" for name, _ in request.headers)
        self._length_left = None if is_chunked else int(lengths[0]) if lengths else 0
        self._last_bytes, self._n_excess = b"", 0
        if is_chunked and lengths:
            self.error = BoundError(400, "A request may have Content-Length or Transfer-Encoding, not both.")
            raise h11.RemoteProtocolError(str(self.error))


class Parsing(Protocol):
    """A connection with received bytes to parse."""

    def parse_some(self) -> int:
        """Parse up to the next boundary; return the number of events, 0 if more bytes must arrive first."""


class ParseQueue:
    """Serves connections with bytes to parse round robin, EVENTS_PER_ITERATION events per event loop
    iteration."""

    def __init__(self) -> None:
        self.max_events = 0  # the most events in one iteration so far
        self._waiting: deque[Parsing] = deque()
        self._queued: set[Parsing] = set()
        self._n_events = 0  # in this iteration
        self._is_scheduled = False

    def add(self, connection: Parsing) -> None:
        """Parse now if this iteration has events left, otherwise in a later one."""
        if connection not in self._queued:
            self._queued.add(connection)
            self._waiting.append(connection)
            self._work()

    def _work(self) -> None:
        while self._waiting and self._n_events < EVENTS_PER_ITERATION:
            connection = self._waiting.popleft()
            n_events = connection.parse_some()
            self._n_events += n_events
            if n_events:
                self._waiting.append(connection)
            else:
                self._queued.discard(connection)
        self.max_events = max(self.max_events, self._n_events)
        if self._n_events and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._is_scheduled = False
        self._n_events = 0
        self._work()


class ReadControl(FlowControl):
    """Pauses reading while the application has a large body to read or too much input is unparsed."""

    _is_app_full = False
    _is_input_full = False

    def pause_reading(self) -> None:
        """Pause for the application (called by uvicorn)."""
        self._is_app_full = True
        self._apply()

    def resume_reading(self) -> None:
        """Resume for the application (called by uvicorn)."""
        self._is_app_full = False
        self._apply()

    def limit_input(self, n_bytes: int) -> None:
        """Pause or resume, depending on the number of unparsed bytes."""
        self._is_input_full = n_bytes > INPUT_BYTES_MAX
        self._apply()

    def _apply(self) -> None:
        if self._is_app_full or self._is_input_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class ChunkWriter:
    """The extension BODY_WRITER of one request. A chunked body has no state between two chunks (RFC 9112,
    7.1), so h11 does not need to see them."""

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport, flow: FlowControl) -> None:
        # The cycle has this writer in its scope. A cycle of references would leave each request, with all of
        # its objects, to a full garbage collection.
        self._cycle = weakref.ref(cycle)
        self._transport, self._flow = transport, flow

    def __call__(self, data: bytes) -> bool:
        """Write one chunk; return False if that must wait or the response is not open."""
        cycle = self._cycle()
        if cycle is None or self._flow.write_paused or cycle.disconnected:
            return False
        if cycle.response_complete or not cycle.response_started:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class Connection(H11Protocol):
    """uvicorn's connection with further bounds. Use `connection_class`.

    - Input is parsed in pieces that `ParseQueue` bounds; rejected input gets a JSON error.
    - A request's head, and the rest of a rejected body, must arrive within `timeout_s`. uvicorn bounds only
      the idle time after a response. `BodyLimitMiddleware` bounds a request in progress.
    - A client that shuts down its sending side after a request gets the response (not with TLS, which has no
      such state). A closed connection looks the same until something is written to it. So after
      HALF_CLOSED_POLL_S without a response, `100 Continue` is written, which a connected client skips.
    """

    timeout_s: float
    limit: ConnectionLimit
    queue: ParseQueue
    conn: RequestParser
    flow: ReadControl
    _timer: asyncio.TimerHandle | None = None
    _half_closed_timer: asyncio.TimerHandle | None = None
    _is_half_closed = False
    _is_rejected = False
    _was_probed = False
    _fd = -1
    _n_lingered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the connection (called by asyncio)."""
        super().connection_made(transport)
        self.conn = RequestParser()
        self.flow = ReadControl(transport)
        self._received = bytearray()
        self._fd = transport.get_extra_info("socket").fileno()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Queue received bytes for the parser (called by asyncio)."""
        self._unset_keepalive_if_required()
        if self._is_rejected:
            self._n_lingered += len(data)
            if self._n_lingered > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        self._received += data
        self.flow.limit_input(len(self._received))
        self.queue.add(self)
        self._watch()

    def parse_some(self) -> int:
        """Parse up to the next boundary, as `Parsing` defines.

        Never raises, because other connections may call it through the queue.
        """
        before = self.conn.n_events, self.conn.n_headers
        cycle = self.cycle
        try:
            if self.transport.is_closing() or self._is_rejected or not self.conn.feed(self._received):
                self._end_if_half_closed()
                return 0
            self.handle_events()
        except BoundError as e:
            self._reject(e)
        except Exception:
            log.exception("a connection failed")
            self.transport.abort()
            return 0
        if self.cycle is not cycle:
            self.limit.mark_busy(self._fd)
            if self.cycle.scope["http_version"] == "1.1":  # HTTP/1.0 has no chunks
                writer = ChunkWriter(self.cycle, self.transport, self.flow)
                self.cycle.scope["extensions"] = {BODY_WRITER: writer}  # type: ignore[dict-item]  # not JSON
        self.flow.limit_input(len(self._received))
        self._watch()
        n_events = self.conn.n_events - before[0]
        self.limit.stats.events += n_events
        self.limit.stats.headers += self.conn.n_headers - before[1]
        return max(1, n_events)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- the same text for every error
        """Send the parser's error (called by uvicorn after h11 has rejected the input)."""
        self._reject(self.conn.error)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's never keeps it open
        """Return True to keep the sending side open (called by asyncio)."""
        may_respond = self._is_responding() or bool(self._received)
        if self.scheme == "https" or self._is_rejected or not may_respond or self._is_gone():
            return False
        self._is_half_closed = True
        if self._half_closed_timer is None:
            self._half_closed_timer = self.loop.call_later(HALF_CLOSED_POLL_S, self._poll_half_closed)
        self.queue.add(self)  # the received bytes may be a request or its end
        return True

    def on_response_complete(self) -> None:
        """Continue with the next request (called by uvicorn)."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self.limit.mark_idle(self._fd)
        self._watch()
        self.queue.add(self)  # a pipelined request, or the end of a half-closed connection

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers (called by asyncio)."""
        super().connection_lost(exc)
        self._received.clear()
        self._stop()
        if self._half_closed_timer is not None:
            self._half_closed_timer.cancel()

    def _is_open(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_responding(self) -> bool:
        """Return True while a completely received request is open."""
        is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR)
        return self._is_open() and is_whole

    def _reject(self, error: BoundError) -> None:
        """Send a JSON error if no response has begun; close after the client had time to read it."""
        self._is_rejected = True
        self._received.clear()
        self.limit.stats.bad_requests += 1
        log.warning("rejected a request: %d %s", error.status, error)
        if self._is_open():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_error(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        self.flow.resume_reading()

    def _send_error(self, error: BoundError) -> None:
        body = to_json(ApiError(error.status, str(error), code="invalid_request").body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _end_if_half_closed(self) -> None:
        if self._is_half_closed and not self._is_responding():
            self.transport.close()

    def _poll_half_closed(self) -> None:
        """End the request of a disconnected client. Only a write can detect that before a response begins."""
        self._half_closed_timer = None
        if self.transport.is_closing():
            return
        if self._is_gone():
            self.transport.abort()
            return
        is_http_1_1 = self._is_open() and self.scope["http_version"] == "1.1"
        if is_http_1_1 and not self.cycle.response_started and not self._was_probed:
            self._was_probed = True
            self.transport.write(CONTINUE)
        self._half_closed_timer = self.loop.call_later(HALF_CLOSED_POLL_S, self._poll_half_closed)

    def _is_gone(self) -> bool:
        """Return True once the client's system has reset the connection. Half-closing does not reset it."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return bool(poll.poll(0))

    def _watch(self) -> None:
        if self._is_rejected:
            return
        if self._is_open() or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.timeout_s, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(timeout_s: float, limit: ConnectionLimit) -> type[Connection]:
    """Return the class for the connections of one server, which share a limit and a queue."""
    shared = {"timeout_s": timeout_s, "limit": limit, "queue": ParseQueue()}
    return type("Connection", (Connection,), shared)
