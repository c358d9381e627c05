"""Server-sent events: one writer for each stream, and exactly one terminator, after which no byte goes out.

The terminator is an outcome frame (a `finish_reason` or an error) and `data: [DONE]`. The status is truthful:
headers wait for the first frame or the first error, HEADERS_WAIT_S at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.types import Send

from llaisys.server.errors import ApiError, send_error, to_json
from llaisys.server.pieces import PIECE_BYTES

HEADERS_WAIT_S = 10.0
PING_INTERVAL_S = 15.0
SMALL_BYTES = 8 * 1024
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class SseWriter:
    """Writes frames to one client. Two tasks use it: the one that streams, and the one that keeps it awake.

    - `opening`: frames that go out with the headers, before anything else.
    - `on_stall`: called when a write has been stuck for `stall_s`; the client has stopped reading, and a
      stream that nobody reads would hold KV cells.
    - States: unsent -> open -> closed. A lock makes each move and its bytes one step.
    """

    def __init__(
        self,
        send: Send,
        headers: Mapping[str, str],
        opening: Iterable[Any],
        on_stall: Callable[[], object],
        stall_s: float,
    ) -> None:
        self._send = send
        self._headers = {**HEADERS, **headers}
        self._opening = opening
        self._on_stall = on_stall
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._is_open = False
        self._is_closed = False
        self._last_sent_s = self._loop.time()

    async def frames(self, values: Iterable[Any]) -> None:
        """One `data:` frame each, in one write if they are small. Large ones are made one by one: the client
        takes one before the next is there."""
        async with self._lock:
            await self._ensure_open()
            await self._write_frames(values)

    async def finish(self, values: Iterable[Any]) -> None:
        """The last frames and the terminator."""
        async with self._lock:
            await self._ensure_open()
            await self._write(_frames(values) + DONE, more=False)

    async def fail(self, error: ApiError) -> None:
        """The error: the whole HTTP answer if no header has gone out, else a frame and the terminator."""
        async with self._lock:
            if self._is_open:
                await self._write(_frames([error.body()]) + DONE, more=False)
            elif not self._is_closed:
                self._is_closed = True
                await send_error(self._send, error)

    async def keep_awake(
        self, headers_wait_s: float = HEADERS_WAIT_S, ping_interval_s: float = PING_INTERVAL_S
    ) -> None:
        """Sends the headers if nothing did in time, then pings after each interval of silence. Endless."""
        await asyncio.sleep(headers_wait_s)
        async with self._lock:
            await self._ensure_open()
        while True:
            await asyncio.sleep(self._last_sent_s + ping_interval_s - self._loop.time())
            if self._last_sent_s + ping_interval_s <= self._loop.time():
                async with self._lock:
                    await self._write(PING)

    async def _ensure_open(self) -> None:
        if not self._is_open and not self._is_closed:
            self._is_open = True
            headers = [
                (name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._write_frames(self._opening)

    async def _write_frames(self, values: Iterable[Any]) -> None:
        data = bytearray()
        for value in values:
            data += _frames([value])
            if len(data) >= PIECE_BYTES:
                await self._write(bytes(data))
                data.clear()
                await asyncio.sleep(0)
        await self._write(bytes(data))

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """With the lock held. Nothing goes out after the terminator."""
        if self._is_closed or (more and not data):
            return
        self._is_closed = not more
        stall = self._loop.call_later(self._stall_s, self._on_stall)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            if more and len(data) > SMALL_BYTES:
                # A send waits for the one before it; this one, of nothing, until the client has taken `data`.
                await self._send({"type": "http.response.body", "body": b"", "more_body": True})
        finally:
            stall.cancel()
        self._last_sent_s = self._loop.time()


def _frames(values: Iterable[Any]) -> bytes:
    return b"".join(b"data: " + to_json(value) + b"\n\n" for value in values)
