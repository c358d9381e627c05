"""The bounds on open connections and on open requests.

Connections that wait for a request make way for new ones, oldest first; a connection with an open request
is never closed for another. So a flood of idle sockets keeps neither probes nor clients out.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from llaisys.server.errors import send_error, too_many_open_requests
from llaisys.server.gate import PROBES

REQUESTS_MAX = 1024
# Connections above REQUESTS_MAX: with that many requests open, a probe still gets its answer.
PROBE_CONNECTIONS = 32
# asyncio accepts so many connections before it does anything else.
ACCEPTS_PER_TURN = 128

log = logging.getLogger("llaisys.connections")


@dataclass(slots=True)
class ConnectionStats:
    """What has happened to connections so far, for metrics and tests."""

    accepted: int = 0
    refused: int = 0  # closed at accept: every other connection had an open request
    evicted: int = 0  # closed while waiting for a request, for a newer connection
    bad_requests: int = 0  # answered by the connection itself: not HTTP, or beyond a bound of the head
    requests_refused: int = 0  # 503: too many open requests
    headers: int = 0  # parsed
    events: int = 0  # parsed: request heads with their headers, pieces of bodies


class AcceptedSocket(socket.socket):
    """A connection that tells its limit when it is closed."""

    limit: ConnectionLimit

    def close(self) -> None:
        """As socket.close."""
        self.limit.forget(self)
        super().close()


class ConnectionLimit:
    """At most `maximum` open connections, each either waiting for a request or answering one.

    It counts accepted sockets rather than HTTP connections, so that a client that never finishes its TLS
    handshake counts, too.
    """

    def __init__(self, maximum: int = REQUESTS_MAX + PROBE_CONNECTIONS) -> None:
        self.maximum = maximum
        self.stats = ConnectionStats()
        # In the order in which they would be closed: first those that never sent a whole request head.
        self._new: dict[int, AcceptedSocket] = {}
        self._idle: dict[int, AcceptedSocket] = {}
        self._busy: dict[int, AcceptedSocket] = {}

    def admit(self, accepted: AcceptedSocket) -> bool:
        """Count a connection, closing another where needed; False if all others have an open request."""
        if len(self._new) + len(self._idle) + len(self._busy) >= self.maximum and not self._evict():
            self.stats.refused += 1
            log.warning("connections are refused: all %d have an open request", self.maximum)
            return False
        self.stats.accepted += 1
        self._new[accepted.fileno()] = accepted
        accepted.limit = self
        return True

    def mark_busy(self, fd: int) -> None:
        """The connection has an open request."""
        self._move(fd, self._busy)

    def mark_idle(self, fd: int) -> None:
        """The connection's request has been answered."""
        self._move(fd, self._idle)

    def forget(self, accepted: AcceptedSocket) -> None:
        """The connection is closed."""
        for each in (self._new, self._idle, self._busy):
            if each.get(accepted.fileno()) is accepted:
                del each[accepted.fileno()]

    def _evict(self) -> bool:
        """Shut the oldest waiting connection down; asyncio finds its end and closes it."""
        waiting = self._new or self._idle
        if not waiting:
            return False
        oldest = waiting.pop(next(iter(waiting)))
        with contextlib.suppress(OSError):  # its client was faster
            oldest.shutdown(socket.SHUT_RDWR)
        self.stats.evicted += 1
        log.warning("idle connections are closed for new ones: %d are open", self.maximum)
        return True

    def _move(self, fd: int, to: dict[int, AcceptedSocket]) -> None:
        """Does nothing for a connection that was evicted and has not noticed yet."""
        for each in (self._new, self._idle, self._busy):
            if fd in each:
                to[fd] = each.pop(fd)
                return


class Listener(socket.socket):
    """A listening socket whose connections are limited."""

    def __init__(self, *arguments: Any) -> None:
        """`arguments`: those of socket.socket."""
        super().__init__(*arguments)
        self.limit = ConnectionLimit()

    def accept(self) -> tuple[socket.socket, Any]:
        """As socket.accept; connections above the limit are closed. Raises ConnectionAbortedError after
        ACCEPTS_PER_TURN of those, which ends a turn of asyncio's."""
        for _ in range(ACCEPTS_PER_TURN):
            plain, address = super().accept()
            accepted = AcceptedSocket(self.family, self.type, self.proto, plain.detach())
            if self.limit.admit(accepted):
                return accepted, address
            socket.socket.close(accepted)
        raise ConnectionAbortedError


class RequestBound:
    """At most REQUESTS_MAX open requests; one more gets 503, unless it is a probe. Pure ASGI."""

    def __init__(self, app: ASGIApp, stats: ConnectionStats, maximum: int = REQUESTS_MAX) -> None:
        self._app = app
        self._stats = stats
        self._maximum = maximum
        self._n_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self._n_open >= self._maximum and scope["path"] not in PROBES:
            self._stats.requests_refused += 1
            log.warning("requests are refused: %d are open", self._n_open)
            await send_error(send, too_many_open_requests(self._maximum))
            return
        self._n_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_open -= 1
