"""Background responses: generated without a client, whose newest events clients can follow.

A run is the same response as that of a connected client; its events go to a bounded buffer. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import NoReturn

from starlette.responses import Response
from starlette.types import ASGIApp, Message

from llaisys.errors import ExhaustedError, RejectedError
from llaisys.server.http_errors import ApiError
from llaisys.server.response_body import Json
from llaisys.shares import Shares

# Maximum runs that have not ended; each client has a share. Ended runs keep their events while they are among
# the newest.
RUNS_MAX = 64
ENDED_RUNS_MAX = 64
EVENTS_BYTES_MAX = 2 << 20

log = logging.getLogger("llaisys.server")


class EventBuffer:
    """The newest events of a stream, as frames, up to `bytes_max` bytes and at least one.

    `first`: the sequence number of the oldest event that is kept.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames: deque[bytes] = deque()
        self._n_bytes = 0
        self._changed = asyncio.Event()
        self.first = 0
        self.is_over = False

    def append(self, frame: bytes) -> None:
        """Add an event; drop the oldest ones if there are too many bytes."""
        self._frames.append(frame)
        self._n_bytes += len(frame)
        while self._n_bytes > self._bytes_max and len(self._frames) > 1:
            self._n_bytes -= len(self._frames.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        """Mark the end: no event follows."""
        self.is_over = True
        self._wake()

    def check(self, number: int) -> None:
        """Raise ApiError (400) if the event `number` was dropped."""
        if number < self.first:
            raise ApiError(
                400,
                f"starting_after is {number - 1}; events up to {self.first - 1} are no longer kept. Read the "
                "response without stream.",
                code="events_dropped",
                param="starting_after",
            )

    async def follow(self, number: int) -> AsyncIterator[list[bytes]]:
        """Yield the frames from the event `number` on, as they arrive, until the end.

        Raises ApiError if the reader is so slow that the next event was dropped.
        """
        while True:
            self.check(number)
            n_new = self.first + len(self._frames) - number
            frames = [*islice(reversed(self._frames), max(0, n_new))][::-1]
            if frames:
                number += len(frames)
                yield frames
            elif self.is_over:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundRun:
    """One response that is generated in the background.

    `app`: sends the stream (ASGI). `snapshot`: returns the response as it is now. `cancel`: cancels its
    generation.
    """

    def __init__(self, app: ASGIApp, snapshot: Callable[[], Json], cancel: Callable[[], None]) -> None:
        self.events = EventBuffer(EVENTS_BYTES_MAX)
        self.snapshot = snapshot
        self._cancel = cancel
        self._opened = asyncio.Event()
        self._rejection: list[Message] = []  # the HTTP error of a run that did not begin
        self.task = asyncio.ensure_future(self._run(app))
        self.task.add_done_callback(self._on_end)

    @property
    def has_begun(self) -> bool:
        """Return True if the stream of the run has begun."""
        return self._opened.is_set()

    async def begin(self) -> Response | None:
        """Wait until the run has begun. Return the error response of one that has not, or raise its error."""
        opened = asyncio.ensure_future(self._opened.wait())
        try:
            await asyncio.wait({opened, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if self.has_begun:
            return None
        self.task.result()
        start, *body = self._rejection
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
        return Response(b"".join(each["body"] for each in body), start["status"], headers)

    async def cancel(self) -> None:
        """Cancel the generation, if it has not ended, and wait for its end."""
        if not self.task.done():
            self._cancel()
        await asyncio.wait({self.task})

    async def _run(self, app: ASGIApp) -> None:
        try:
            await app({"type": "http"}, _never, self._send)
        except Exception:
            if not self.has_begun:
                raise
            log.exception("a background response was not stored")

    def _on_end(self, task: asyncio.Future[None]) -> None:  # noqa: ARG002 -- the signature of callbacks
        """End the events, which are all that an ended run keeps."""
        self.events.end()
        self.snapshot = dict
        self._cancel = _nothing

    async def _send(self, message: Message) -> None:
        """Receive what a client would (ASGI): events, pings, or an HTTP error."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._opened.set()
        elif not self._opened.is_set():
            self._rejection.append(message)
        else:
            for frame in message["body"].split(b"\n\n"):
                if frame.startswith(b"event: "):
                    self.events.append(frame + b"\n\n")


def _nothing() -> None:
    """Do nothing: an ended run cannot be canceled."""


async def _never() -> NoReturn:
    """Wait without an end, because a run has no client that could disconnect (ASGI's `receive`)."""
    await asyncio.Event().wait()
    raise AssertionError("this event is never set")


class BackgroundRuns:
    """All runs that have not ended, and the newest ended ones."""

    def __init__(self, n_clients: int = 1) -> None:
        self._shares = Shares(RUNS_MAX, n_clients)
        self._runs: OrderedDict[tuple[str, str], BackgroundRun] = OrderedDict()

    def find(self, owner: str, id: str) -> BackgroundRun | None:
        """Return the owner's run; None if there is none, or its events are no longer kept."""
        return self._runs.get((owner, id))

    def check(self, owner: str, id: str) -> None:
        """Raise RejectedError if the owner has a run of this id, ExhaustedError if it has too many."""
        if (owner, id) in self._runs:
            raise RejectedError(f"request id {id!r} is in use", param="request_id")
        used = Counter(key[0] for key, run in self._runs.items() if not run.events.is_over)
        if not self._shares.allows(used, owner):
            raise ExhaustedError(
                f"{RUNS_MAX} background responses are generated, or {self._shares.maximum} of one client; "
                "try again when one has ended"
            )

    def add(self, owner: str, id: str, run: BackgroundRun) -> None:
        """Keep a run that was started after `check`, unless it ends before it has begun.

        Its client may disconnect before that, and find it later.
        """
        self._runs[owner, id] = run
        run.task.add_done_callback(lambda _: None if run.has_begun else self.remove(owner, id))
        ended = [key for key, each in self._runs.items() if each.events.is_over]
        for key in ended[: max(0, len(ended) - ENDED_RUNS_MAX)]:
            del self._runs[key]

    def remove(self, owner: str, id: str) -> None:
        """Stop keeping an ended run."""
        self._runs.pop((owner, id), None)

    async def wait(self, timeout_s: float) -> None:
        """Wait until all runs have ended."""
        tasks = [run.task for run in self._runs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
