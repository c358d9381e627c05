"""CompletionResponse: the response of a generation, as a stream or as one JSON object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.errors import LlaisysError
from llaisys.outputs import FinishReason, RequestOutput
from llaisys.server.access_log import client_id_of, note, note_first_token, notes_of, request_id_of
from llaisys.server.completion_builder import CompletionBuilder
from llaisys.server.http_errors import ApiError, ended, send_error
from llaisys.server.logprobs import has_many_logprobs
from llaisys.server.metrics import SEND_TIMEOUT
from llaisys.server.response_body import PIECE_BYTES, Json, send_parts
from llaisys.server.state import RequestEntry, state_of
from llaisys.server.stream_writer import StreamWriter, body_writer_of

Deltas: TypeAlias = AsyncIterator[RequestOutput]
_Item: TypeAlias = RequestOutput | Exception | None

NORMAL_FINISH_REASONS = (None, FinishReason.STOP.value, FinishReason.LENGTH.value)

log = logging.getLogger("llaisys.server")


async def merge_streams(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the stream, delta) as deltas arrive; each stream keeps its order.

    The first error ends all streams. Closing this iterator closes every stream, which cancels their requests.
    """
    if len(streams) == 1:
        async with closing_deltas(streams[0]) as deltas:
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
        async with closing_deltas(stream) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as e:  # noqa: BLE001 -- the reader raises it
        end = e
    await queue.put((index, end))


def closing_deltas(stream: Deltas) -> aclosing[AsyncGenerator[RequestOutput, None]]:
    """Return a context that closes the stream at its end, which cancels the request."""
    return aclosing(cast("AsyncGenerator[RequestOutput, None]", stream))


class CompletionResponse(Response):
    """An ASGI response that reads `streams` to their end; a disconnected client cancels them.

    It owns the streams and always closes them. An error before the first byte is an HTTP error. A later error
    is the builder's error chunks and the terminator of its format.
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
        self._has_token = False
        self._n_bytes = 0  # collected so far
        self._is_collected = False
        self.is_stream = False

    def as_stream(self) -> CompletionResponse:
        """Make this response a stream; return it."""
        self.is_stream = True
        return self

    def collected(self) -> CompletionResponse:
        """Count the bytes of a stream as those of one object, because its end repeats it; return the same
        response."""
        self._is_collected = True
        return self

    def registered(self, entry: RequestEntry) -> CompletionResponse:
        """Register this response in the request registry while it is open, for cancellation; return it."""
        self._entry = entry
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI). The body was read before, so `receive` only reports a disconnect."""
        if self._entry is None:
            await self._run(scope, receive, send)
            return
        with state_of(self._request).requests.open(self._entry, self.cancel):
            await self._run(scope, receive, send)

    def cancel(self) -> None:
        """Abort the engine's requests. Each ends within a step with a last output."""
        assert self._entry is not None
        self._is_cancelled = True
        for request_id in self._entry.request_ids:
            self._entry.engine.abort(request_id)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(
            self._send_stream(scope, send) if self.is_stream else self._send_collected(send)
        )
        try:
            await until_done_or_gone(work, receive, self._note_gone)
        finally:
            state_of(self._request).response_bytes.remove(self._n_bytes, client_id_of(self._request))
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

    def _note_gone(self) -> bool:
        """Note that the client has disconnected; return False if the response was complete.

        `receive` also reports a disconnect after the last byte, before the work has returned. A response with
        an end reason is complete.
        """
        if "end_reason" in notes_of(self._request):
            return False
        note(self._request, end_reason="client_gone")
        return True

    async def _send_stream(self, scope: Scope, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        stall_s = state_of(self._request).config.send_timeout_s

        def on_stall() -> None:
            self._note_stall()
            task.cancel()

        writer = StreamWriter(
            send,
            self._builder.stream_format,
            self._extra_headers,
            self._builder.opening(),
            on_stall,
            stall_s,
            body_writer_of(scope),
        )
        keep_alive_task = asyncio.ensure_future(writer.keep_alive())
        try:
            async with aclosing(merge_streams(self._streams)) as deltas:
                async for index, delta in deltas:
                    chunks = await self._chunks_of(index, delta)
                    if not self._is_collected:
                        await writer.frames(chunks)
                        continue
                    chunks = list(chunks)
                    await writer.frames(chunks)
                    await self._collect_chunks(chunks)
            self._note_end()
            await writer.finish(self._builder.closing())
        except Exception as e:  # noqa: BLE001 -- every stream must end with a terminator
            error = self._wire_error(e)
            if not await writer.fail(self._builder.error_chunks(error)):
                await send_error(send, self._request.scope, error)
        finally:
            keep_alive_task.cancel()
            await asyncio.gather(keep_alive_task, return_exceptions=True)

    async def _send_collected(self, send: Send) -> None:
        try:
            await self._collect_chunks(self._builder.opening())
            async with aclosing(merge_streams(self._streams)) as deltas:
                async for index, delta in deltas:
                    await self._collect_chunks(await self._chunks_of(index, delta))
        except Exception as e:  # noqa: BLE001 -- every response must have a status
            await send_error(send, self._request.scope, self._wire_error(e))
            return
        self._note_end()
        await send_parts(send, self._extra_headers, self._builder.parts())

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

    async def _chunks_of(self, index: int, delta: RequestOutput) -> Iterable[Json]:
        """Return the chunks of a delta. Those with many logprobs take tenths of a second, so a thread builds
        them."""
        chunks = self._build_chunks(index, delta)
        if delta.prompt_logprobs is None and has_many_logprobs(delta):
            return await asyncio.to_thread(list, chunks)
        return chunks

    def _build_chunks(self, index: int, delta: RequestOutput) -> Iterable[Json]:
        if self._is_cancelled:
            raise ended(FinishReason.ABORT.value)
        for output in delta.outputs:
            if output.finish_reason not in NORMAL_FINISH_REASONS:
                raise ended(str(output.finish_reason))
        if not self._has_token and any(output.token_ids for output in delta.outputs):
            self._has_token = True
            note_first_token(self._request, delta.queued_s)
        self._builder.usage.add(index, delta)
        return self._builder.chunks(index, delta)

    def _note_end(self) -> None:
        """Note a normal end, with the finish reasons of all choices."""
        note(self._request, end_reason=",".join(sorted(self._builder.finish_reasons)))

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


async def until_done_or_gone(
    work: asyncio.Future[None], receive: Receive, on_gone: Callable[[], bool]
) -> None:
    """Wait until `work` is done. If the client disconnects before, call `on_gone`, which returns True if the
    work is then to be canceled."""
    gone = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not on_gone():
            await asyncio.wait({work})
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
