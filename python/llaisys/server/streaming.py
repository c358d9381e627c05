"""CompletionResponse: the response of a generation, as server-sent events or as one JSON object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.errors import LlaisysError
from llaisys.outputs import FinishReason, RequestOutput
from llaisys.server.access_log import client_id_of, note, note_first_token, notes_of, request_id_of
from llaisys.server.completion_builder import CompletionBuilder
from llaisys.server.http_errors import ApiError, ended, send_error, to_json
from llaisys.server.metrics import SEND_TIMEOUT
from llaisys.server.response_body import PIECE_BYTES, Json, send_parts
from llaisys.server.state import RequestEntry, state_of

Deltas: TypeAlias = AsyncIterator[RequestOutput]
_Item: TypeAlias = RequestOutput | Exception | None

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
NORMAL_FINISH_REASONS = (None, FinishReason.STOP.value, FinishReason.LENGTH.value)

log = logging.getLogger("llaisys.server")


async def merge_streams(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the stream, delta) as deltas arrive; each stream keeps its order.

    The first error ends all streams. Closing this iterator closes every stream, which cancels their requests.
    """
    if len(streams) == 1:
        async with _closing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, _Item]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    n_open = len(streams)
    try:
        while n_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_open -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: Deltas, queue: asyncio.Queue[tuple[int, _Item]]) -> None:
    """Put a stream's deltas into the queue, then its error, or None at a normal end; nothing if canceled."""
    end: Exception | None = None
    try:
        async with _closing(stream) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as e:  # noqa: BLE001 -- the reader raises it
        end = e
    await queue.put((index, end))


def _closing(stream: Deltas) -> aclosing[AsyncGenerator[RequestOutput, None]]:
    """Return a context that closes the stream at its end, which cancels the request."""
    return aclosing(cast("AsyncGenerator[RequestOutput, None]", stream))


class SseWriter:
    """Writes frames to one client. Two tasks use it: the stream's task, and the task that sends pings.

    Each stream has one writer and exactly one terminator, after which no byte is sent. The terminator is an
    outcome frame (a `finish_reason` or an error) and `data: [DONE]`. The headers wait up to HEADERS_WAIT_S
    seconds for the first frame or error, so that the status is correct.

    - `opening`: frames to send with the headers.
    - `on_stall`: called when a write has been blocked for `stall_s` seconds: the client has stopped reading,
      and its stream would keep KV cells.
    - States: unsent -> open -> closed. A lock makes each transition atomic with the bytes that it sends.
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
        """Send one `data:` frame for each value, in one write if they are small.

        Large frames are built one by one, each after the client has read the previous one.
        """
        async with self._lock:
            await self._ensure_open()
            await self._write_frames(values)

    async def finish(self, values: Iterable[Any]) -> None:
        """Send the last frames and the terminator."""
        async with self._lock:
            await self._ensure_open()
            await self._write(_frames(values) + DONE, more=False)

    async def fail(self, error: ApiError) -> None:
        """Send the error as the HTTP response if no header was sent, otherwise as a frame and the
        terminator."""
        async with self._lock:
            if self._is_open:
                await self._write(_frames([error.body()]) + DONE, more=False)
            elif not self._is_closed:
                self._is_closed = True
                await send_error(self._send, error)

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
        """Write with the lock held. Sends nothing after the terminator."""
        if self._is_closed or (more and not data):
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


def _frames(values: Iterable[Any]) -> bytes:
    return b"".join(b"data: " + to_json(value) + b"\n\n" for value in values)


class CompletionResponse(Response):
    """An ASGI response that reads `streams` to their end; a disconnected client cancels them.

    It owns the streams and always closes them. An error before the first byte is an HTTP error; later errors
    are an error frame and `[DONE]`.
    """

    def __init__(
        self,
        request: Request,
        streams: Sequence[Deltas],
        builder: CompletionBuilder,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._request = request
        self._streams = streams
        self._builder = builder
        self._extra_headers = dict(headers)
        self._entry: RequestEntry | None = None
        self._is_cancelled = False
        self._finish_reasons: set[str] = set()
        self._n_bytes = 0  # collected so far, if this is not a stream
        self.is_stream = False

    def as_stream(self) -> CompletionResponse:
        """Make this response server-sent events; return it."""
        self.is_stream = True
        return self

    def registered(self, entry: RequestEntry) -> CompletionResponse:
        """Register this response in the request registry while it is open, for cancellation; return it."""
        self._entry = entry
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's signature
        """Send the response (ASGI). The body was read before, so `receive` only reports a disconnect."""
        if self._entry is None:
            await self._run(receive, send)
            return
        with state_of(self._request).requests.open(self._entry, self._cancel):
            await self._run(receive, send)

    def _cancel(self) -> None:
        """Abort the engine's requests. Each ends within a step with a last output."""
        assert self._entry is not None
        self._is_cancelled = True
        for request_id in self._entry.request_ids:
            self._entry.engine.abort(request_id)

    async def _run(self, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(
            self._send_stream(send) if self.is_stream else self._send_collected(send)
        )
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            # `receive` also reports a disconnect after the last byte, before `work` has returned. A response
            # with an end reason was complete.
            if not work.done() and "end_reason" not in notes_of(self._request):
                note(self._request, end_reason="client_gone")
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            usage = self._builder.usage
            note(
                self._request,
                stream=self.is_stream,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
        if not work.cancelled():
            work.result()

    async def _send_stream(self, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        stall_s = state_of(self._request).config.send_timeout_s

        def on_stall() -> None:
            self._note_stall()
            task.cancel()

        writer = SseWriter(send, self._extra_headers, self._builder.opening(), on_stall, stall_s)
        keep_alive_task = asyncio.ensure_future(writer.keep_alive())
        try:
            async with aclosing(merge_streams(self._streams)) as deltas:
                async for index, delta in deltas:
                    await writer.frames(self._build_chunks(index, delta))
            self._note_end()
            await writer.finish(self._builder.closing())
        except Exception as e:  # noqa: BLE001 -- every stream must end with a terminator
            await writer.fail(self._wire_error(e))
        finally:
            keep_alive_task.cancel()
            await asyncio.gather(keep_alive_task, return_exceptions=True)

    async def _send_collected(self, send: Send) -> None:
        try:
            try:
                await self._collect_chunks(self._builder.opening())
                async with aclosing(merge_streams(self._streams)) as deltas:
                    async for index, delta in deltas:
                        await self._collect_chunks(self._build_chunks(index, delta))
            except Exception as e:  # noqa: BLE001 -- every response must have a status
                await send_error(send, self._wire_error(e))
                return
            self._note_end()
            await send_parts(send, self._extra_headers, self._builder.parts())
        finally:
            state_of(self._request).response_bytes.remove(self._n_bytes, client_id_of(self._request))

    async def _collect_chunks(self, chunks: Iterable[Json]) -> None:
        """Add chunks to the collected response. Raises RejectedError or ExhaustedError if it is too large."""
        counts, client_id = state_of(self._request).response_bytes, client_id_of(self._request)
        n_made = 0
        for chunk in chunks:
            n_bytes = self._builder.collect(chunk)
            counts.add(n_bytes, self._n_bytes, client_id)
            self._n_bytes += n_bytes
            n_made += n_bytes
            if n_made >= PIECE_BYTES:
                n_made = 0
                await asyncio.sleep(0)

    def _build_chunks(self, index: int, delta: RequestOutput) -> Iterator[Json]:
        if self._is_cancelled:
            raise ended(FinishReason.ABORT.value)
        for output in delta.outputs:
            if output.finish_reason not in NORMAL_FINISH_REASONS:
                raise ended(str(output.finish_reason))
        if any(output.token_ids for output in delta.outputs):
            note_first_token(self._request, delta.queued_s)
        self._builder.usage.add(index, delta)
        return self._note_finish_reasons(self._builder.chunks(index, delta))

    def _note_finish_reasons(self, chunks: Iterable[Json]) -> Iterator[Json]:
        """Yield the chunks and note their finish reasons."""
        for chunk in chunks:
            for choice in chunk.get("choices", ()):  # an embedding has no choices
                if choice["finish_reason"]:
                    self._finish_reasons.add(choice["finish_reason"])
            yield chunk

    def _note_end(self) -> None:
        """Note a normal end, with the finish reasons of all choices."""
        note(self._request, end_reason=",".join(sorted(self._finish_reasons)))

    def _note_stall(self) -> None:
        """Note that the client read nothing for `send_timeout_s`, unless the stream has ended."""
        if "end_reason" not in notes_of(self._request):
            note(self._request, end_reason=SEND_TIMEOUT)
            state_of(self._request).metrics.count_error(SEND_TIMEOUT)

    def _wire_error(self, error: Exception) -> ApiError:
        """Note and count the error, and log it if it is a bug. Return it as the client receives it."""
        state = state_of(self._request)
        api_error = state.wire_error(error, request_id_of(self._request))
        if not isinstance(error, (LlaisysError, ApiError)):
            log.exception("request %s failed", request_id_of(self._request), exc_info=error)
        note(self._request, end_reason=api_error.code)
        state.metrics.count_error(api_error.code)
        return api_error


async def _client_gone(receive: Receive) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
