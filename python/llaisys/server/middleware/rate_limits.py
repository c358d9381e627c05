"""Middleware that limits the number of requests: per client, while the queue is full, and of the whole
server."""

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
    too_many_open_requests,
    too_many_open_requests_of_key,
    too_many_requests_per_minute,
)
from llaisys.server.listener import REQUESTS_MAX, ConnectionStats
from llaisys.server.middleware.hosts import PROBES
from llaisys.server.state import ServerState

MINUTE_S = 60.0
COUNTED = ("POST", "PUT", "DELETE")
# Requests to these paths enter the queue of the model that their body names.
QUEUEING = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/chat/completions",
        "/completions",
        "/embeddings",
        "/responses",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
    }
)

log = logging.getLogger("llaisys.connections")


@dataclass(slots=True)
class _Client:
    """A client's open requests, and its token bucket: one minute's requests, refilled evenly."""

    left: float = math.inf
    filled_s: float = 0.0
    n_open: int = 0

    def end_one(self) -> None:
        """Count the end of an open request."""
        self.n_open -= 1


class RateLimitMiddleware:
    """Responds 429 above `max_open` open requests or `per_minute` requests per minute of a client.

    None: no limit. A client is a key's name; without keys there is one client. Every POST, PUT and DELETE
    counts, except cancellations, which free resources. With a limit per minute, each response has OpenAI's
    `x-ratelimit-*-requests` headers. Pure ASGI, inside AuthMiddleware.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_open: int | None,
        per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._max_open = max_open
        self._per_minute = per_minute
        self._clock = clock
        self._clients = defaultdict[str, _Client](_Client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http" or scope["method"] not in COUNTED or scope["path"].endswith("/cancel"):
            await self._app(scope, receive, send)
            return
        client = self._clients[scope.get("state", {}).get("client_id", "")]
        rejection = self._rejection(client)
        if rejection is None:
            client.left -= 1
        headers, permit = self._headers(client), contextlib.ExitStack()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                permit.close()  # before the client sees the end, because its next request may follow at once
            await send(message)

        if rejection is not None:
            await send_error(send_with_headers, scope, rejection)
            return
        with permit:
            client.n_open += 1
            permit.callback(client.end_one)
            await self._app(scope, receive, send_with_headers)

    def _rejection(self, client: _Client) -> ApiError | None:
        """Return the error for this client's next request, if any. Refills the bucket for the elapsed
        time."""
        if self._per_minute is not None:
            now_s, rate = self._clock(), self._per_minute / MINUTE_S
            client.left = min(self._per_minute, client.left + (now_s - client.filled_s) * rate)
            client.filled_s = now_s
            if client.left < 1:
                return too_many_requests_per_minute(self._per_minute, math.ceil((1 - client.left) / rate))
        if self._max_open is not None and client.n_open >= self._max_open:
            return too_many_open_requests_of_key(self._max_open)
        return None

    def _headers(self, client: _Client) -> dict[str, str]:
        if self._per_minute is None:
            return {}
        return _rate_limit_headers(self._per_minute, client.left)


def _rate_limit_headers(per_minute: int, left: float) -> dict[str, str]:
    """Return OpenAI's headers: the limit, the remaining requests, and the time until the bucket is full."""
    reset_s = (per_minute - left) * MINUTE_S / per_minute
    return {
        "x-ratelimit-limit-requests": str(per_minute),
        "x-ratelimit-remaining-requests": str(int(left)),
        "x-ratelimit-reset-requests": f"{reset_s:.3f}s",
    }


class QueueLimitMiddleware:
    """Responds 429, before the body is read, while no model would queue a request.

    The queue of the request's model may still be full, which is found after the body was read.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        is_queueing = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in QUEUEING
        full = self._state.refusal(scope.get("state", {}).get("client_id", "")) if is_queueing else None
        if full is None:
            await self._app(scope, receive, send)
            return
        rejection = to_api_error(full, "")
        scope["state"]["notes"]["end_reason"] = rejection.code
        self._state.metrics.count_error(rejection.code)
        await send_error(send, scope, rejection)


class OpenRequestLimitMiddleware:
    """Responds 503 above `maximum` open requests, except to probes. Pure ASGI."""

    def __init__(self, app: ASGIApp, stats: ConnectionStats, maximum: int = REQUESTS_MAX) -> None:
        self._app = app
        self._stats = stats
        self._maximum = maximum
        self._n_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if self._n_open >= self._maximum and scope["path"] not in PROBES:
            self._stats.requests_refused += 1
            log.warning("rejecting requests: %d are open", self._n_open)
            await send_error(send, scope, too_many_open_requests(self._maximum))
            return
        self._n_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_open -= 1
