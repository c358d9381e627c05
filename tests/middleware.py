"""Send requests through one middleware of the server, without the others."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llaisys.server.http_errors import ApiError


def statuses_through(middleware: ASGIApp, *bodies: bytes) -> list[int]:
    """Return the statuses of POST requests in order. None ends before the last has a response."""

    async def ask_all() -> list[int]:
        go, statuses = asyncio.Event(), []

        async def ask_one(body: bytes) -> None:
            parts = iter([body])

            async def receive() -> Message:
                part = next(parts, None)
                if part is None or body == b"never":
                    await asyncio.Event().wait()
                return {"type": "http.request", "body": part, "more_body": False}

            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    if len(statuses) == len(bodies):
                        go.set()
                    await go.wait()

            headers = [(b"content-length", str(len(body)).encode())]
            await middleware(
                {"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send
            )

        await asyncio.gather(*map(ask_one, bodies))
        return statuses

    return asyncio.run(ask_all())


async def reading(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 -- ASGI
    """An application behind the middleware: reads the body, and responds with 200 or the error of reading."""
    try:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    except ApiError as e:
        await send({"type": "http.response.start", "status": e.status_code, "headers": []})
        await send({"type": "http.response.body", "body": b""})
