"""BodyLimitMiddleware: limits the bytes of each request body and of all bodies, and the time of an upload."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.config import Config
from llaisys.server.http_errors import (
    ApiError,
    bodies_too_large,
    body_too_large,
    body_too_slow,
    send_error,
)
from llaisys.shares import Shares


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits: bytes of one body, bytes of all open requests' bodies, and seconds of an upload."""

    bytes_max: int
    bytes_in_flight: int
    upload_s: float

    @staticmethod
    def of(config: Config) -> BodyLimits:
        """Return the limits of the configuration."""
        return BodyLimits(config.max_body_bytes, config.max_body_bytes_in_flight, config.upload_timeout_s)


class BodyLimitMiddleware:
    """Responds 413, 429 or 408: for a declared length before the body is read, otherwise once a limit is
    exceeded.

    A body counts until the end of its request, because the request keeps it. Each client has a share of the
    bytes of all bodies. Bytes that are declared but have not arrived count only within their client's share.
    After a rejection, the connection stays open so that the client can read the response; the rest of the
    body is read and dropped.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, n_clients: int = 1) -> None:
        self._app = app
        self._limits = limits
        self._shares = Shares(limits.bytes_in_flight, n_clients)
        # For each client with an open body: received bytes, and declared bytes that have not arrived.
        self._arrived: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        body = _CountedBody(self, scope.get("state", {}).get("client_id", ""), receive)
        try:
            body.declare(int(declared) if declared.isdigit() else 0)
        except ApiError as error:
            await send_error(send, scope, error)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._change(body.client_id, -body.n_received, -body.n_unsent)

    def declare(self, client_id: str, n_bytes: int) -> None:
        """Count a declared body. Raises ApiError above a limit, without counting it."""
        if n_bytes > self._limits.bytes_max:
            raise body_too_large(self._limits.bytes_max)
        if self._arrived[client_id] + self._unsent[client_id] + n_bytes > self._shares.maximum:
            raise bodies_too_large()
        self._count(client_id, 0, n_bytes)

    def arrive(self, body: _CountedBody, n_bytes: int) -> None:
        """Count received bytes of a body. Raises ApiError above a limit, without counting them."""
        if body.n_received + n_bytes > self._limits.bytes_max:
            raise body_too_large(self._limits.bytes_max)
        self._count(body.client_id, n_bytes, -min(n_bytes, body.n_unsent))

    @property
    def upload_s(self) -> float:
        """Maximum seconds of an upload."""
        return self._limits.upload_s

    def _count(self, client_id: str, n_arrived: int, n_unsent: int) -> None:
        used = {client: self._counted(client) for client in {*self._arrived, *self._unsent}}
        self._change(client_id, n_arrived, n_unsent)
        n_more = self._counted(client_id) - used.get(client_id, 0)
        if n_more > 0 and not self._shares.allows(used, client_id, n_more):
            self._change(client_id, -n_arrived, -n_unsent)
            raise bodies_too_large()

    def _counted(self, client_id: str) -> int:
        return self._arrived[client_id] + min(self._unsent[client_id], self._shares.reserved)

    def _change(self, client_id: str, n_arrived: int, n_unsent: int) -> None:
        for counter, n_bytes in ((self._arrived, n_arrived), (self._unsent, n_unsent)):
            counter[client_id] += n_bytes
            if not counter[client_id]:
                del counter[client_id]


class _CountedBody:
    """One body: its received bytes, its declared bytes that have not arrived, and its deadline."""

    def __init__(self, limits: BodyLimitMiddleware, client_id: str, receive: Receive) -> None:
        self.client_id = client_id
        self.n_received = self.n_unsent = 0
        self._limits = limits
        self._receive = receive
        self._is_whole = False
        self._deadline_s = asyncio.get_running_loop().time() + limits.upload_s

    def declare(self, n_bytes: int) -> None:
        """Count the declared length. Raises ApiError."""
        self._limits.declare(self.client_id, n_bytes)
        self.n_unsent = n_bytes

    async def receive(self) -> Message:
        """Receive the next message (ASGI). After the body's end, wait until the client disconnects.

        Raises ApiError above a limit.
        """
        if self._is_whole:
            return await self._receive()
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), left_s)
        except asyncio.TimeoutError:
            raise body_too_slow(self._limits.upload_s) from None
        n_bytes = len(message.get("body", b""))
        self._limits.arrive(self, n_bytes)
        self.n_received += n_bytes
        self.n_unsent -= min(n_bytes, self.n_unsent)
        self._is_whole = not message.get("more_body", False)
        return message
