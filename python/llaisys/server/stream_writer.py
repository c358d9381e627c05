"""StreamWriter: writes the chunks of a stream to one client, in the format of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from starlette.types import Scope, Send

from llaisys.server.http_errors import to_json
from llaisys.server.response_body import PIECE_BYTES

HEADERS_WAIT_S = 10.0
PING_INTERVAL_S = 15.0
SMALL_BYTES = 8 * 1024
# The name of an extension in ASGI's `scope["extensions"]`: a function that writes a piece of a body without a
# length at once, past the middleware. It returns False, having written nothing, if `send` must be awaited
# instead, because the client has to read first or the response is not open. It belongs to the `send` of the
# same call: who passes another `send` passes a scope without it.
BODY_WRITER = "llaisys.body_writer"
BodyWriter: TypeAlias = Callable[[bytes], bool]
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How chunks become bytes.

    - `frame`: returns the bytes of one chunk.
    - `ping`: sent in a silent interval; empty if the format has no frame without a meaning.
    - `terminator`: the last bytes of every stream.
    """

    content_type: str
    frame: Callable[[Any], bytes]
    ping: bytes
    terminator: bytes


def _data_frame(chunk: Any) -> bytes:
    return b"data: " + to_json(chunk) + b"\n\n"


def named_frame(chunk: Any) -> bytes:
    """Return a server-sent event that has the `type` of its chunk as its name."""
    return b"event: %b\n%b" % (chunk["type"].encode(), _data_frame(chunk))


# Server-sent events as in OpenAI's chat completions.
DATA_EVENTS = StreamFormat(
    "text/event-stream; charset=utf-8", _data_frame, ping=b": ping\n\n", terminator=b"data: [DONE]\n\n"
)


def _refuse(data: bytes) -> bool:  # noqa: ARG001 -- the signature of a BodyWriter
    """Write nothing, so that each piece is awaited."""
    return False


def body_writer_of(scope: Scope) -> BodyWriter:
    """Return the extension BODY_WRITER of an ASGI call, or a function that never writes."""
    return cast("BodyWriter", scope.get("extensions", {}).get(BODY_WRITER, _refuse))


class StreamWriter:
    """Writes chunks to one client. Two tasks use it: the stream's task, and the task that sends pings.

    Each stream has one writer and exactly one end, after which no byte is sent. The end is an outcome chunk
    (a finish reason or an error) and the terminator of the format, if it has one. The headers wait up to
    HEADERS_WAIT_S seconds for the first chunk or error, so that the status is correct.

    - `opening`: chunks to send with the headers.
    - `on_stall`: called when a write has been blocked for `stall_s` seconds: the client has stopped reading,
      and its stream would keep KV cells.
    - `write_now`: `body_writer_of` the same call as `send`. It takes most pieces, those that are small.
    - States: unsent -> open -> closed. A lock makes each transition atomic with the bytes that it sends.
    """

    def __init__(
        self,
        send: Send,
        format: StreamFormat,
        headers: Mapping[str, str],
        opening: Iterable[Any],
        on_stall: Callable[[], object],
        stall_s: float,
        write_now: BodyWriter = _refuse,
    ) -> None:
        self._send = send
        self._format = format
        self._headers = {"content-type": format.content_type, **HEADERS, **headers}
        self._opening = opening
        self._on_stall = on_stall
        self._stall_s = stall_s
        self._write_now = write_now
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._is_open = False
        self._is_closed = False
        self._last_sent_s = self._loop.time()

    async def frames(self, values: Iterable[Any]) -> None:
        """Send one frame for each chunk, in one write if they are small.

        Large frames are built one by one, each after the client has read the previous one.
        """
        async with self._lock:
            await self._ensure_open()
            await self._write_frames(values)

    async def finish(self, values: Iterable[Any]) -> None:
        """Send the last frames and the terminator."""
        async with self._lock:
            await self._ensure_open()
            await self._write(self._frames(values) + self._format.terminator, more=False)

    async def fail(self, values: Iterable[Any]) -> bool:
        """Send error chunks and the terminator.

        Returns False if the stream has not begun; it never will then, so the caller sends an HTTP error.
        """
        async with self._lock:
            if not self._is_open and not self._is_closed:
                self._is_closed = True
                return False
            await self._write(self._frames(values) + self._format.terminator, more=False)
            return True

    async def keep_alive(
        self, headers_wait_s: float = HEADERS_WAIT_S, ping_interval_s: float = PING_INTERVAL_S
    ) -> None:
        """Send the headers if nothing was sent in time, then a ping after each silent interval. Never
        returns."""
        await asyncio.sleep(headers_wait_s)
        async with self._lock:
            await self._ensure_open()
        while True:
            await asyncio.sleep(self._last_sent_s + ping_interval_s - self._loop.time())
            if self._last_sent_s + ping_interval_s <= self._loop.time():
                async with self._lock:
                    await self._write(self._format.ping)

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
            data += self._format.frame(value)
            if len(data) >= PIECE_BYTES:
                await self._write(bytes(data))
                data.clear()
                await asyncio.sleep(0)
        await self._write(bytes(data))

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """Write with the lock held. Sends nothing after the terminator."""
        if self._is_closed or (more and not data):
            return
        if more and len(data) <= SMALL_BYTES and self._write_now(data):
            self._last_sent_s = self._loop.time()
            return
        self._is_closed = not more
        stall = self._loop.call_later(self._stall_s, self._on_stall)
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            if more and len(data) > SMALL_BYTES:
                # A send waits for the previous one, so this empty send returns once the client has read
                # `data`.
                await self._send({"type": "http.response.body", "body": b"", "more_body": True})
        finally:
            stall.cancel()
        self._last_sent_s = self._loop.time()

    def _frames(self, values: Iterable[Any]) -> bytes:
        return b"".join(map(self._format.frame, values))
