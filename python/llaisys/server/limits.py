"""The bound on a request's body, by its declared length and by the bytes that really come. Pure ASGI."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.server.errors import body_too_large, send_error

BODY_BYTES_MAX = 4 * 1024 * 1024


class BodyLimit:
    """413 before the body is read where its length is declared, else as soon as it is over."""

    def __init__(self, app: ASGIApp, limit_bytes: int = BODY_BYTES_MAX) -> None:
        self._app = app
        self._limit = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdigit() and int(declared) > self._limit:
            await send_error(send, body_too_large(self._limit).with_headers({"connection": "close"}))
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise body_too_large(self._limit).with_headers({"connection": "close"})
            return message

        await self._app(scope, counted, send)
