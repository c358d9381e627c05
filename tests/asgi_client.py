"""Clients that talk to an ASGI application directly, so that they can disconnect or stall at any moment."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiClient:
    """One raw ASGI exchange whose client can disconnect at any moment."""

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 8000),
        }
        self._body: Message | None = {
            "type": "http.request",
            "body": json.dumps(body).encode(),
            "more_body": False,
        }
        self._gone = asyncio.Event()
        self.sent: list[Message] = []
        self.news = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            message, self._body = self._body, None
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.news.set()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._gone.set()  # as uvicorn does: after the whole response, `receive` returns "disconnect"
            await asyncio.sleep(0)

    def open(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._app(self._scope, self.receive, self.send))  # type: ignore[arg-type]

    def disconnect(self) -> None:
        self._gone.set()

    def raw(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class StalledClient(AsgiClient):
    """A client that never reads the response body."""

    async def send(self, message: Message) -> None:
        await super().send(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()
