"""One HTTP answer from one generation, streamed or whole: the same chunks, sent one by one or collected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.errors import LlaisysError
from llaisys.server.book import Entry
from llaisys.server.errors import ApiError, ended, send_error
from llaisys.server.fan_in import Deltas, fan_in
from llaisys.server.metrics import STALLED
from llaisys.server.pieces import PIECE_BYTES, Part, send_parts
from llaisys.server.sse import SseWriter
from llaisys.server.state import state_of
from llaisys.server.trace import client_id_of, note, note_first_token, notes_of, request_id_of
from llaisys.server.usage import Usage
from llaisys.types import FinishReason, RequestOutput

Json: TypeAlias = dict[str, Any]

WIRE_REASONS = (None, FinishReason.STOP.value, FinishReason.LENGTH.value)

log = logging.getLogger("llaisys.server")


class Shape(Protocol):
    """How an endpoint writes a generation. `usage` is counted by the answer; a shape only reads it."""

    usage: Usage

    def opening(self) -> list[Json]:
        """Chunks before the first token."""

    def chunks(self, index: int, delta: RequestOutput) -> Iterable[Json]:
        """Chunks of one delta of the prompt `index`, those with a finish reason included; may be none. Lazy,
        and none is large."""

    def closing(self) -> list[Json]:
        """Chunks after the last token of all choices."""

    def collect(self, chunk: Json) -> int:
        """Adds a chunk to the body of a non-stream answer; returns the bytes that it has grown by."""

    def parts(self) -> list[Part]:
        """The body of a non-stream answer, as JSON in pieces of any size."""


class Answer(Response):
    """An ASGI answer that reads `streams` to their end, or until the client goes away, which cancels them.

    Owns the streams: however it ends, all are closed. Errors before the first byte are plain HTTP errors;
    after it, an error frame and `[DONE]`.
    """

    def __init__(
        self, request: Request, streams: Sequence[Deltas], shape: Shape, headers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._request = request
        self._streams = streams
        self._shape = shape
        self._extra_headers = dict(headers)
        self._entry: Entry | None = None
        self._is_cancelled = False
        self._finish_reasons: set[str] = set()
        self._n_bytes = 0  # of a whole answer, so far
        self.is_stream = False

    def as_stream(self) -> Answer:
        """The same answer as server-sent events."""
        self.is_stream = True
        return self

    def listed(self, entry: Entry) -> Answer:
        """The same answer, in the book of requests while it is given: others can cancel it there."""
        self._entry = entry
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's signature
        """ASGI. `receive` has only the client's going away left to say."""
        if self._entry is None:
            await self._give(receive, send)
            return
        with state_of(self._request).requests.open(self._entry, self._cancel):
            await self._give(receive, send)

    def _cancel(self) -> None:
        """The engine ends each request within a step, and the end comes as an output like any other."""
        assert self._entry is not None
        self._is_cancelled = True
        for request_id in self._entry.request_ids:
            self._entry.engine.abort(request_id)

    async def _give(self, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._stream(send) if self.is_stream else self._collect(send))
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            # After the last byte `receive` says "disconnect" too, before `work` has had its last turn: an
            # answer with an end is not one whose client left.
            if not work.done() and "end_reason" not in notes_of(self._request):
                note(self._request, end_reason="client_gone")
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            usage = self._shape.usage
            note(
                self._request,
                stream=self.is_stream,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
        if not work.cancelled():
            work.result()

    async def _stream(self, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        stall_s = state_of(self._request).config.send_timeout_s

        def on_stall() -> None:
            self._note_stall()
            task.cancel()

        writer = SseWriter(send, self._extra_headers, self._shape.opening(), on_stall, stall_s)
        keeper = asyncio.ensure_future(writer.keep_awake())
        try:
            async with aclosing(fan_in(self._streams)) as deltas:
                async for index, delta in deltas:
                    await writer.frames(self._take(index, delta))
            self._note_end()
            await writer.finish(self._shape.closing())
        except Exception as e:  # noqa: BLE001 -- every end of a stream has a terminator
            await writer.fail(self._wire_error(e))
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _collect(self, send: Send) -> None:
        try:
            try:
                await self._keep(self._shape.opening())
                async with aclosing(fan_in(self._streams)) as deltas:
                    async for index, delta in deltas:
                        await self._keep(self._take(index, delta))
            except Exception as e:  # noqa: BLE001 -- every answer has a status
                await send_error(send, self._wire_error(e))
                return
            self._note_end()
            await send_parts(send, self._extra_headers, self._shape.parts())
        finally:
            state_of(self._request).response_bytes.remove(self._n_bytes, client_id_of(self._request))

    async def _keep(self, chunks: Iterable[Json]) -> None:
        """Adds chunks to the whole answer. Raises RejectedError or ExhaustedError once it is too large."""
        counts, client_id = state_of(self._request).response_bytes, client_id_of(self._request)
        n_made = 0
        for chunk in chunks:
            n_bytes = self._shape.collect(chunk)
            counts.add(n_bytes, self._n_bytes, client_id)
            self._n_bytes += n_bytes
            n_made += n_bytes
            if n_made >= PIECE_BYTES:
                n_made = 0
                await asyncio.sleep(0)

    def _take(self, index: int, delta: RequestOutput) -> Iterator[Json]:
        if self._is_cancelled:
            raise ended(FinishReason.ABORT.value)
        for answer in delta.outputs:
            if answer.finish_reason not in WIRE_REASONS:
                raise ended(str(answer.finish_reason))
        if any(answer.token_ids for answer in delta.outputs):
            note_first_token(self._request, delta.queued_s)
        self._shape.usage.add(index, delta)
        return self._noted(self._shape.chunks(index, delta))

    def _noted(self, chunks: Iterable[Json]) -> Iterator[Json]:
        """The chunks; their finish reasons are noted."""
        for chunk in chunks:
            for choice in chunk.get("choices", ()):  # an embedding has none
                if choice["finish_reason"]:
                    self._finish_reasons.add(choice["finish_reason"])
            yield chunk

    def _note_end(self) -> None:
        """A good end; of several choices every reason that there was."""
        note(self._request, end_reason=",".join(sorted(self._finish_reasons)))

    def _note_stall(self) -> None:
        """The client has taken nothing for `send_timeout_s`. A stream that had its end keeps that reason."""
        if "end_reason" not in notes_of(self._request):
            note(self._request, end_reason=STALLED)
            state_of(self._request).metrics.refused(STALLED)

    def _wire_error(self, error: Exception) -> ApiError:
        """The error as the client hears it; noted, counted, and logged if it is a bug."""
        state = state_of(self._request)
        answer = state.wire_error(error, request_id_of(self._request))
        if not isinstance(error, (LlaisysError, ApiError)):
            log.exception("request %s failed", request_id_of(self._request), exc_info=error)
        note(self._request, end_reason=answer.code)
        state.metrics.refused(answer.code)
        return answer


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
