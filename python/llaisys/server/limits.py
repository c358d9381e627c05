"""The bounds on what arrives: each body, all of them together, the time that one may take. Pure ASGI."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.config import Config
from llaisys.errors import QueueFullError
from llaisys.server.errors import (
    ApiError,
    bodies_too_large,
    body_too_large,
    body_too_slow,
    send_error,
    to_api_error,
)
from llaisys.server.state import ServerState

# Their requests go into the queue of a model, which only the body names.
QUEUEING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bytes of one body, bytes of those of all open requests, and seconds for one to arrive."""

    bytes_max: int
    bytes_in_flight: int
    upload_s: float

    @staticmethod
    def of(config: Config) -> BodyLimits:
        """Those of the configuration."""
        return BodyLimits(config.max_body_bytes, config.max_body_bytes_in_flight, config.upload_timeout_s)


class BodyGate:
    """413, 429 or 408 before the body is read where its length is declared, else as soon as it is over.

    A body counts from its head to the end of its request, because the request keeps it. The connection stays
    open behind a refusal, so that the client reads it; what is left of the body is read and dropped.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        body = _Body(self, receive, int(declared) if declared.isdigit() else 0)
        try:
            body.hold(body.declared)
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._in_flight -= body.held

    def take(self, n_bytes: int, held: int) -> None:
        """Counts more bytes of a body that has `held`. Raises ApiError for what would be too much."""
        if held + n_bytes > self._limits.bytes_max:
            raise body_too_large(self._limits.bytes_max)
        if self._in_flight + n_bytes > self._limits.bytes_in_flight:
            raise bodies_too_large()
        self._in_flight += n_bytes

    @property
    def upload_s(self) -> float:
        """Seconds for a body to arrive."""
        return self._limits.upload_s


class _Body:
    """One body: the bytes that it holds of the budget (what it declared, at least), and its time."""

    def __init__(self, gate: BodyGate, receive: Receive, declared: int) -> None:
        self.declared = declared
        self.held = 0
        self._gate = gate
        self._receive = receive
        self._n_received = 0
        self._is_whole = False
        self._deadline_s = asyncio.get_running_loop().time() + gate.upload_s

    def hold(self, n_bytes: int) -> None:
        """Makes sure that so many bytes are held. Raises ApiError."""
        if n_bytes > self.held:
            self._gate.take(n_bytes - self.held, self.held)
            self.held = n_bytes

    async def receive(self) -> Message:
        """ASGI; raises ApiError. Behind the body's end it waits for the client's going away, for ever."""
        if self._is_whole:
            return await self._receive()
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), left_s)
        except asyncio.TimeoutError:
            raise body_too_slow(self._gate.upload_s) from None
        self._n_received += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        self.hold(self._n_received)
        return message


class QueueGate:
    """429 before the body is read, for a request that no model would take: all their queues are full.

    It costs a look at each queue; what comes through may still find the queue of its model full.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        asks = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in QUEUEING
        if not asks or not self._state.is_full():
            await self._app(scope, receive, send)
            return
        refusal = to_api_error(QueueFullError("as many requests wait as may; try again in a moment"), "")
        scope["state"]["notes"]["end_reason"] = refusal.code
        self._state.metrics.refused(refusal.code)
        await send_error(send, refusal)
