"""Bytes from clients become events: bounded before they are parsed, and a bounded number of events per turn
of the event loop, over all connections."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import Protocol

import h11

HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100
# A chunked body may have as many bytes of framing (sizes, extensions, trailers) as of content, and these.
FRAMING_BYTES_MAX = 16 * 1024
# At once to the parser: a chunk may be one byte, which with its framing is six.
CHUNKED_BYTES_AT_ONCE, BODY_BYTES_AT_ONCE = 2 * 1024, 64 * 1024
# About 3 ms of h11 (5 us an event). A request head costs as many, for the task that it starts.
EVENTS_PER_TURN, EVENTS_PER_REQUEST = 512, 64
BLANK_LINE = re.compile(rb"\n\r?\n")  # as h11 finds the end of a head


class BoundError(Exception):
    """A request that goes beyond a bound, and the status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestParser(h11.Connection):
    """h11 that is fed up to the next boundary only, after a look at the bytes, and counts its events."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES_MAX)
        self.n_events = 0
        self.n_headers = 0
        self.error = BoundError(400, "")  # why h11 refused what it was fed
        self._n_searched = 0  # bytes of the input in which no head ends
        self._length_left: int | None = None  # of a body of known length
        self._last_bytes = b""  # fed, of a chunked body: an empty line may begin there
        self._n_excess = 0  # bytes of framing of a chunked body, less those of its content

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's; also refuses a request with two lengths."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as e:
            # Of h11's words only the kind of fault: the rest repeats what the client sent.
            self.error = BoundError(e.error_status_hint, f"Invalid HTTP: {str(e).partition(':')[0]}.")
            raise
        if isinstance(event, h11.Request):
            self._begin_body(event)
            self.n_headers += len(event.headers)
            self.n_events += EVENTS_PER_REQUEST + len(event.headers)
        elif isinstance(event, h11.Data):
            self.n_events += 1
            if self._length_left is None:
                self._n_excess -= 2 * len(event.data)
            else:
                self._length_left -= len(event.data)
        return event

    def feed(self, received: bytearray) -> bool:
        """Move the bytes up to the next boundary into h11; False if more have to come first.

        A boundary is the end of a head or of a body, so that h11 never has bytes of the next request. Raises
        BoundError for a head or a body that is beyond its bounds.
        """
        n_bytes = 0
        if self.their_state is h11.IDLE:
            n_bytes = self._head_bytes(received)
        elif self.their_state is h11.SEND_BODY:
            n_bytes = self._body_bytes(received)
        elif self.their_state in (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR):
            received.clear()  # behind the last request of this connection
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
        # Besides the headers there are the request line and the empty one.
        if received.count(b"\n", 0, n_bytes) > HEADERS_MAX + 2:
            raise BoundError(431, f"The request has more than {HEADERS_MAX} headers.")
        # h11 refuses at once what begins with a control character: it may be TLS, and have no lines.
        is_invalid = bool(received) and received[0] < 0x21
        self._n_searched = 0 if end is not None else n_bytes
        return n_bytes if end is not None or is_invalid else 0

    def _body_bytes(self, received: bytearray) -> int:
        if self._length_left is not None:
            return min(len(received), BODY_BYTES_AT_ONCE, self._length_left)
        if self._n_excess > FRAMING_BYTES_MAX:
            raise BoundError(400, "The chunks of the request body are too small; send larger ones.")
        piece = self._last_bytes + received[:CHUNKED_BYTES_AT_ONCE]
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
            self.error = BoundError(400, "A request has Content-Length or Transfer-Encoding, not both.")
            raise h11.RemoteProtocolError(str(self.error))


class Parsing(Protocol):
    """A connection with bytes to parse."""

    def parse_some(self) -> int:
        """Parse up to the next boundary; return the number of events, 0 if more bytes have to come first."""


class ParseQueue:
    """Connections with bytes to parse, round robin: EVENTS_PER_TURN events in a turn of the event loop."""

    def __init__(self) -> None:
        self.most_events = 0  # in one turn, so far
        self._waiting: deque[Parsing] = deque()
        self._queued: set[Parsing] = set()
        self._n_events = 0  # in this turn
        self._is_scheduled = False

    def add(self, connection: Parsing) -> None:
        """Parse now if this turn has events left, else in a later one."""
        if connection not in self._queued:
            self._queued.add(connection)
            self._waiting.append(connection)
            self._work()

    def _work(self) -> None:
        while self._waiting and self._n_events < EVENTS_PER_TURN:
            connection = self._waiting.popleft()
            n_events = connection.parse_some()
            self._n_events += n_events
            if n_events:
                self._waiting.append(connection)
            else:
                self._queued.discard(connection)
        self.most_events = max(self.most_events, self._n_events)
        if self._n_events and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._n_events = 0
        self._work()
