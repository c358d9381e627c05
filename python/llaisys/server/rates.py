"""What one client may ask at the same time and in a minute. Pure ASGI, inside of the key's gate."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.server.errors import ApiError, send_error, too_many_at_once, too_many_in_a_minute

MINUTE_S = 60.0
COUNTED = ("POST", "PUT", "DELETE")


@dataclass(slots=True)
class _Client:
    """Requests that are open, and those that may still come: a bucket of a minute's, filled evenly."""

    left: float = math.inf
    filled_s: float = 0.0
    n_open: int = 0

    def end_one(self) -> None:
        """An open request has ended."""
        self.n_open -= 1


class RateGate:
    """429 for a client with `at_once` open requests, or `a_minute` of them in a minute; None: no bound.

    A client is a key's name (there are no more clients than names); without keys all are one. Counted is
    every POST, PUT and DELETE but a cancel, which makes room. Where requests are counted by the minute, each
    answer tells what is left in OpenAI's `x-ratelimit-*-requests` headers.
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
        told, permit = self._headers(client), contextlib.ExitStack()

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(told)
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                permit.close()  # before the client can see the end: its next request may be there at once
            await send(message)

        if refusal is not None:
            await send_error(telling, refusal)
            return
        with permit:
            client.n_open += 1
            permit.callback(client.end_one)
            await self._app(scope, receive, telling)

    def _refusal(self, client: _Client) -> ApiError | None:
        """Why this client's next request may not come now. Fills the bucket for the time that went by."""
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
        return _told(self._a_minute, client.left)


def _told(a_minute: int, left: float) -> dict[str, str]:
    """OpenAI's headers: the bound, what is left of it, and the time until all of it is there again."""
    reset_s = (a_minute - left) * MINUTE_S / a_minute
    return {
        "x-ratelimit-limit-requests": str(a_minute),
        "x-ratelimit-remaining-requests": str(int(left)),
        "x-ratelimit-reset-requests": f"{reset_s:.3f}s",
    }
