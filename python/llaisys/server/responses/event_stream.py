"""EventStream: the response that follows the events of a background response."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.server.access_log import note
from llaisys.server.http_errors import ApiError
from llaisys.server.metrics import SEND_TIMEOUT
from llaisys.server.responses.background import BackgroundRun
from llaisys.server.responses.builder import NAMED_EVENTS
from llaisys.server.state import state_of
from llaisys.server.stream_writer import StreamFormat, StreamWriter, body_writer_of, named_frame
from llaisys.server.streaming import until_done_or_gone

# The events are kept as frames.
STORED_EVENTS = StreamFormat(NAMED_EVENTS.content_type, bytes, ping=NAMED_EVENTS.ping, terminator=b"")


class EventStream(Response):
    """An ASGI response that follows a run; its client may disconnect without an effect on the run."""

    def __init__(self, request: Request, run: BackgroundRun, first: int, headers: dict[str, str]) -> None:
        super().__init__()
        self._request = request
        self._events = run.events
        self._first = first
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        work = asyncio.ensure_future(self._send(scope, send))
        note(self._request, stream=True)
        await until_done_or_gone(work, receive, self._note_gone)
        if not work.cancelled():
            work.result()

    def _note_gone(self) -> bool:
        note(self._request, end_reason="client_gone")
        return True

    async def _send(self, scope: Scope, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        state = state_of(self._request)

        def on_stall() -> None:
            note(self._request, end_reason=SEND_TIMEOUT)
            state.metrics.count_error(SEND_TIMEOUT)
            task.cancel()

        stall_s = state.config.send_timeout_s
        write_now = body_writer_of(scope)
        writer = StreamWriter(send, STORED_EVENTS, self._extra_headers, (), on_stall, stall_s, write_now)
        await writer.frames(())  # the headers, because the next event may be late
        keep_alive_task = asyncio.ensure_future(writer.keep_alive())
        try:
            async for frames in self._events.follow(self._first):
                await writer.frames(frames)
            await writer.finish(())
        except ApiError as e:
            error = {"code": e.code, "message": e.message, "param": e.param}
            event = {"type": "error", "sequence_number": self._events.first, **error}
            await writer.finish([named_frame(event)])
            note(self._request, end_reason=e.code)
        finally:
            keep_alive_task.cancel()
            await asyncio.gather(keep_alive_task, return_exceptions=True)
