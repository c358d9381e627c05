"""The bounds on what arrives: each body, all of them together, the time that one may take. Pure ASGI."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.config import Config
from llaisys.server.errors import (
    ApiError,
    bodies_too_large,
    body_too_large,
    body_too_slow,
    send_error,
    to_api_error,
)
from llaisys.server.state import ServerState
from llaisys.shares import Shares

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

    A body counts from its head to the end of its request, because the request keeps it. Of several clients
    each has its part of the bytes of all bodies, and bytes that are declared and do not arrive are counted in
    their client's own part alone. The connection stays open behind a refusal, so that the client reads it;
    what is left of the body is read and dropped.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, n_clients: int = 1) -> None:
        self._app = app
        self._limits = limits
        self._shares = Shares(limits.bytes_in_flight, n_clients)
        # Of each client with an open body: bytes that arrived, and bytes that were declared and did not.
        self._arrived: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        body = _Body(self, scope.get("state", {}).get("client_id", ""), receive)
        try:
            body.declare(int(declared) if declared.isdigit() else 0)
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._change(body.client_id, -body.n_received, -body.n_unsent)

    def declare(self, client_id: str, n_bytes: int) -> None:
        """A body of this length is announced. Raises ApiError for too much, and counts nothing then."""
        if n_bytes > self._limits.bytes_max:
            raise body_too_large(self._limits.bytes_max)
        if self._arrived[client_id] + self._unsent[client_id] + n_bytes > self._shares.most:
            raise bodies_too_large()
        self._count(client_id, 0, n_bytes)

    def arrive(self, body: _Body, n_bytes: int) -> None:
        """More bytes of a body are there. Raises ApiError for too much, and counts nothing then."""
        if body.n_received + n_bytes > self._limits.bytes_max:
            raise body_too_large(self._limits.bytes_max)
        self._count(body.client_id, n_bytes, -min(n_bytes, body.n_unsent))

    @property
    def upload_s(self) -> float:
        """Seconds for a body to arrive."""
        return self._limits.upload_s

    def _count(self, client_id: str, n_arrived: int, n_unsent: int) -> None:
        held = {client: self._counted(client) for client in {*self._arrived, *self._unsent}}
        self._change(client_id, n_arrived, n_unsent)
        n_more = self._counted(client_id) - held.get(client_id, 0)
        if n_more > 0 and not self._shares.allows(held, client_id, n_more):
            self._change(client_id, -n_arrived, -n_unsent)
            raise bodies_too_large()

    def _counted(self, client_id: str) -> int:
        return self._arrived[client_id] + min(self._unsent[client_id], self._shares.reserved)

    def _change(self, client_id: str, n_arrived: int, n_unsent: int) -> None:
        for counter, n_bytes in ((self._arrived, n_arrived), (self._unsent, n_unsent)):
            counter[client_id] += n_bytes
            if not counter[client_id]:
                del counter[client_id]


class _Body:
    """One body: what of it has arrived, what was declared and has not, and its time."""

    def __init__(self, gate: BodyGate, client_id: str, receive: Receive) -> None:
        self.client_id = client_id
        self.n_received = self.n_unsent = 0
        self._gate = gate
        self._receive = receive
        self._is_whole = False
        self._deadline_s = asyncio.get_running_loop().time() + gate.upload_s

    def declare(self, n_bytes: int) -> None:
        """Counts the declared length. Raises ApiError."""
        self._gate.declare(self.client_id, n_bytes)
        self.n_unsent = n_bytes

    async def receive(self) -> Message:
        """ASGI; raises ApiError. Behind the body's end it waits for the client's going away, for ever."""
        if self._is_whole:
            return await self._receive()
        left_s = self._deadline_s - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), left_s)
        except asyncio.TimeoutError:
            raise body_too_slow(self._gate.upload_s) from None
        n_bytes = len(message.get("body", b""))
        self._gate.arrive(self, n_bytes)
        self.n_received += n_bytes
        self.n_unsent -= min(n_bytes, self.n_unsent)
        self._is_whole = not message.get("more_body", False)
        return message


class QueueGate:
    """429 before the body is read, for a request that no model would take: the client's places are taken.

    It costs a look at each queue; what comes through may still find the queue of its model full.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        asks = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in QUEUEING
        full = self._state.refusal(scope.get("state", {}).get("client_id", "")) if asks else None
        if full is None:
            await self._app(scope, receive, send)
            return
        refusal = to_api_error(full, "")
        scope["state"]["notes"]["end_reason"] = refusal.code
        self._state.metrics.refused(refusal.code)
        await send_error(send, refusal)
