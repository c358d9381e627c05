"""Limits on the number of requests: of one client, of a full queue, and of the whole server."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.server.http_errors import (
    ApiError,
    send_error,
    to_api_error,
    too_many_at_once,
    too_many_in_a_minute,
    too_many_open_requests,
)
from llaisys.server.listener import REQUESTS_MAX, ConnectionStats
from llaisys.server.middleware.hosts import PROBES
from llaisys.server.state import ServerState

MINUTE_S = 60.0
COUNTED = ("POST", "PUT", "DELETE")

log = logging.getLogger("llaisys.connections")


@dataclass(slots=True)
class _Client:
    """A client's open requests, and its token bucket of one minute's requests, filled evenly."""

    left: float = math.inf
    filled_s: float = 0.0
    n_open: int = 0

    def end_one(self) -> None:
        """Count the end of an open request."""
        self.n_open -= 1


class RateLimitMiddleware:
    """429 for a client with `at_once` open requests, or `a_minute` requests per minute; None: no limit.

    A client is a key's name; without keys there is one client. Every POST, PUT and DELETE counts, except a
    cancellation, which frees resources. With a limit per minute, each response has OpenAI's
    `x-ratelimit-*-requests` headers. Pure ASGI, inside AuthMiddleware.
    """

    def __init__(
        self,
        app: ASGIApp,
        at_once: int | None,
        a_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._at_once = at_once
        self._a_minute = a_minute
        self._clock = clock
        self._clients = defaultdict[str, _Client](_Client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] not in COUNTED or scope["path"].endswith("/cancel"):
            await self._app(scope, receive, send)
            return
        client = self._clients[scope.get("state", {}).get("client_id", "")]
        refusal = self._refusal(client)
        if refusal is None:
            client.left -= 1
        headers, permit = self._headers(client), contextlib.ExitStack()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                permit.close()  # before the client sees the end: its next request may follow at once
            await send(message)

        if refusal is not None:
            await send_error(send_with_headers, refusal)
            return
        with permit:
            client.n_open += 1
            permit.callback(client.end_one)
            await self._app(scope, receive, send_with_headers)

    def _refusal(self, client: _Client) -> ApiError | None:
        """Return the error for this client's next request, if any. Fills the bucket for the elapsed time."""
        if self._a_minute is not None:
            now_s, rate = self._clock(), self._a_minute / MINUTE_S
            client.left = min(self._a_minute, client.left + (now_s - client.filled_s) * rate)
            client.filled_s = now_s
            if client.left < 1:
                return too_many_in_a_minute(self._a_minute, math.ceil((1 - client.left) / rate))
        if self._at_once is not None and client.n_open >= self._at_once:
            return too_many_at_once(self._at_once)
        return None

    def _headers(self, client: _Client) -> dict[str, str]:
        if self._a_minute is None:
            return {}
        return _rate_limit_headers(self._a_minute, client.left)


def _rate_limit_headers(a_minute: int, left: float) -> dict[str, str]:
    """Return OpenAI's headers: the limit, what is left of it, and the time until the bucket is full."""
    reset_s = (a_minute - left) * MINUTE_S / a_minute
    return {
        "x-ratelimit-limit-requests": str(a_minute),
        "x-ratelimit-remaining-requests": str(int(left)),
        "x-ratelimit-reset-requests": f"{reset_s:.3f}s",
    }


# Requests of these paths enter the queue of a model, which only the body names.
QUEUEING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})


class QueueLimitMiddleware:
    """429 before the body is read, for a request that no model would queue.

    It checks each model's queue; a request that passes may still find the queue of its model full.
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
        self._state.metrics.count_error(refusal.code)
        await send_error(send, refusal)


class OpenRequestLimitMiddleware:
    """Up to `maximum` open requests; further ones get 503, except probes. Pure ASGI."""

    def __init__(self, app: ASGIApp, stats: ConnectionStats, maximum: int = REQUESTS_MAX) -> None:
        self._app = app
        self._stats = stats
        self._maximum = maximum
        self._n_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if self._n_open >= self._maximum and scope["path"] not in PROBES:
            self._stats.requests_refused += 1
            log.warning("rejecting requests: %d are open", self._n_open)
            await send_error(send, too_many_open_requests(self._maximum))
            return
        self._n_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_open -= 1
