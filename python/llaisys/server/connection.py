"""A connection: uvicorn's, with bounds on parsing and patience, which serves half-closed clients too."""

from __future__ import annotations

import asyncio
import logging
import select
from http import HTTPStatus

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from llaisys.server.connection_limit import ConnectionLimit
from llaisys.server.errors import ApiError, to_json
from llaisys.server.parse_queue import BoundError, ParseQueue, RequestParser

# Received and not parsed; more is left to the kernel. One read of asyncio's may come on top (256 KiB).
INPUT_BYTES_MAX = 64 * 1024
# Behind a refusal the client may go on sending, and needs to: closing at once would lose the answer.
LINGER_S, LINGER_BYTES_MAX = 2.0, 1024 * 1024
# How often a half-closed connection is looked at, and how soon it is asked whether the client is still there.
HALF_CLOSED_POLL_S = 0.5
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("llaisys.connections")


class ReadControl(FlowControl):
    """Pauses reading while the application has a large body to take, or too much input is not parsed."""

    _is_app_full = False
    _is_input_full = False

    def pause_reading(self) -> None:
        """uvicorn: the application has enough."""
        self._is_app_full = True
        self._apply()

    def resume_reading(self) -> None:
        """uvicorn: the application wants more."""
        self._is_app_full = False
        self._apply()

    def limit_input(self, n_bytes: int) -> None:
        """Note how many bytes wait to be parsed."""
        self._is_input_full = n_bytes > INPUT_BYTES_MAX
        self._apply()

    def _apply(self) -> None:
        if self._is_app_full or self._is_input_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


class Connection(H11Protocol):
    """uvicorn's connection with bounds that it has not. Use `connection_class`.

    - What a client sends is parsed in pieces that `parse_queue.py` bounds; what is refused gets a JSON error.
    - A request's head, and the rest of a refused body, has `patience_s` to arrive. uvicorn bounds the silence
      behind a response only; a request that is being answered has bounds of its own (`BodyGate`).
    - A client that shuts down its sending side behind a request gets the response (without TLS, where that
      does not exist). Closing the connection looks the same until something is written to it. So after
      HALF_CLOSED_POLL_S without a response `100 Continue` is written, which a client that is there skips.
    """

    patience_s: float
    limit: ConnectionLimit
    queue: ParseQueue
    conn: RequestParser
    flow: ReadControl
    _timer: asyncio.TimerHandle | None = None
    _half_closed_timer: asyncio.TimerHandle | None = None
    _is_half_closed = False
    _is_refused = False
    _was_probed = False
    _fd = -1
    _n_lingered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """asyncio."""
        super().connection_made(transport)
        self.conn = RequestParser()
        self.flow = ReadControl(transport)
        self._received = bytearray()
        self._fd = transport.get_extra_info("socket").fileno()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        self._unset_keepalive_if_required()
        if self._is_refused:
            self._n_lingered += len(data)
            if self._n_lingered > LINGER_BYTES_MAX:
                self.transport.abort()
            return
        self._received += data
        self.flow.limit_input(len(self._received))
        self.queue.add(self)
        self._watch()

    def parse_some(self) -> int:
        """See `Parsing`. Never raises: it runs for other connections, too."""
        before = self.conn.n_events, self.conn.n_headers
        cycle = self.cycle
        try:
            if self.transport.is_closing() or self._is_refused or not self.conn.feed(self._received):
                self._end_if_half_closed()
                return 0
            self.handle_events()
        except BoundError as e:
            self._refuse(e)
        except Exception:
            log.exception("a connection failed")
            self.transport.abort()
            return 0
        if self.cycle is not cycle:
            self.limit.mark_busy(self._fd)
        self.flow.limit_input(len(self._received))
        self._watch()
        n_events = self.conn.n_events - before[0]
        self.limit.stats.events += n_events
        self.limit.stats.headers += self.conn.n_headers - before[1]
        return max(1, n_events)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- uvicorn's text for every fault
        """uvicorn, after h11 refused."""
        self._refuse(self.conn.error)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's never keeps it open
        """asyncio; True keeps the sending side open."""
        may_respond = self._is_answering() or bool(self._received)
        if self.scheme == "https" or self._is_refused or not may_respond or self._is_gone():
            return False
        self._is_half_closed = True
        if self._half_closed_timer is None:
            self._half_closed_timer = self.loop.call_later(HALF_CLOSED_POLL_S, self._poll_half_closed)
        self.queue.add(self)  # what was received may be a request, or its end
        return True

    def on_response_complete(self) -> None:
        """uvicorn."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self.limit.mark_idle(self._fd)
        self._watch()
        self.queue.add(self)  # a request that was sent behind the first one, or the end of a half-closed one

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio."""
        super().connection_lost(exc)
        self._received.clear()
        self._stop()
        if self._half_closed_timer is not None:
            self._half_closed_timer.cancel()

    def _is_open(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_answering(self) -> bool:
        """True while a request is open that has arrived whole."""
        is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY, h11.ERROR)
        return self._is_open() and is_whole

    def _refuse(self, error: BoundError) -> None:
        """Send a JSON error if no response has begun, and close once the client had time to read it."""
        self._is_refused = True
        self._received.clear()
        self.limit.stats.bad_requests += 1
        log.warning("a request was refused: %d %s", error.status, error)
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
        if self._is_half_closed and not self._is_answering():
            self.transport.close()

    def _poll_half_closed(self) -> None:
        """End the request of a client that is gone. Before a response begins, writing to it is what tells."""
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
        """True once the client's system has reset the connection, which half-closing does not."""
        poll = select.poll()
        poll.register(self._fd, 0)
        return bool(poll.poll(0))

    def _watch(self) -> None:
        if self._is_refused:
            return
        if self._is_open() or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience_s, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(patience_s: float, limit: ConnectionLimit) -> type[Connection]:
    """The class for one server: its connections share a limit and a queue."""
    shared = {"patience_s": patience_s, "limit": limit, "queue": ParseQueue()}
    return type("Connection", (Connection,), shared)
