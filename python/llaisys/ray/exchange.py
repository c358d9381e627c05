"""HttpExchange and AsgiPipe: an HTTP request that moves from the gateway to a replica, and its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Scope

from llaisys.ray.affinity import Affinity

# What a replica needs of the scope; the rest belongs to the gateway's process.
SCOPE_KEYS = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)
# In a response, the replica that made it; in a request, the one that should handle it.
REPLICA_HEADER = b"x-llaisys-replica"
# Messages that wait for the gateway; then the application waits.
MESSAGES_MAX = 64


@dataclass(frozen=True, slots=True)
class HttpExchange:
    """A request with its whole body. `scope`: ASGI's, with `SCOPE_KEYS` only. `replica`: the wanted one."""

    scope: dict[str, Any]
    body: bytes = field(repr=False)
    affinity: Affinity
    replica: str

    @staticmethod
    def of(scope: Scope, body: bytes, affinity: Affinity) -> HttpExchange:
        """Return the exchange of a request."""
        replica = dict(scope["headers"]).get(REPLICA_HEADER, b"").decode("latin-1")
        return HttpExchange({key: scope[key] for key in SCOPE_KEYS if key in scope}, body, affinity, replica)


class AsgiPipe:
    """Runs between an ASGI application and the consumer of its messages, on one event loop.

    `receive` and `send` are the application's side. The consumer iterates, and calls `close` when it leaves.
    """

    def __init__(self, body: bytes) -> None:
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._messages: list[Message] = []
        self._changed = asyncio.Condition()
        self._is_done = False
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        """Return the body, then wait until the consumer leaves (ASGI)."""
        if self._request:
            return self._request.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Add a message; wait while many are unread. Messages after the consumer left are dropped (ASGI)."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._messages) < MESSAGES_MAX or self._gone.is_set())
            self._messages.append(message)
            self._changed.notify_all()

    async def finish(self) -> None:
        """End the iteration after the messages so far."""
        async with self._changed:
            self._is_done = True
            self._changed.notify_all()

    async def close(self) -> None:
        """Tell the application that the client has disconnected."""
        self._gone.set()
        async with self._changed:
            self._changed.notify_all()

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Yield the messages, as many at a time as there are."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._messages or self._is_done)
                messages, self._messages = self._messages, []
                self._changed.notify_all()
            if not messages:
                return
            yield messages
