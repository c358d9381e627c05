"""LazyEngine: loads the engine of a model on first use, and unloads it when idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from llaisys.engine.client import EngineClient
from llaisys.errors import EngineDeadError, LlaisysError

log = logging.getLogger(__name__)


class LazyEngine:
    """Loads the engine on the first `load` or `get`; unloads it after `idle_unload_s` seconds without a user.

    Concurrent calls share one load. Event loop only; `start`, which may take long, runs on a thread.
    Invariant: between `acquire` and `release` the engine is not unloaded.
    """

    def __init__(self, start: Callable[[], EngineClient], name: str, idle_unload_s: float | None) -> None:
        """`start`: raises RejectedError or UnsupportedError (the model or a setting). `name`: for the log."""
        self._start = start
        self._name = name
        self._idle_unload_s = idle_unload_s
        self._n_users = 0
        self._change: asyncio.Task[None] | None = None  # the load or unload in progress
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self.client: EngineClient | None = None
        self.max_model_len: int | None = None  # of the last load, in tokens

    async def load(self) -> None:
        """Load the engine if needed. Raises the errors of `start`, or EngineDeadError after `close`."""
        while self.client is None:
            if self._closed:
                raise EngineDeadError("shutting down: no new requests")
            change = self._change
            # A finished task stays `_change` until its callback runs, one iteration of the loop later.
            await asyncio.shield(self._begin(self._load()) if change is None or change.done() else change)

    async def get(self) -> EngineClient:
        """Return the loaded engine. Raises EngineDeadError if the load fails or `close` was called meanwhile.

        A failed load is not a rejection, because the request is valid.
        """
        try:
            await self.load()
        except LlaisysError as error:
            log.error("the model %s cannot be loaded: %s", self._name, error)
            raise EngineDeadError(f"the model cannot be loaded: {error}") from error
        if self._closed:  # otherwise the engine could complete the request before `close` stops it
            raise EngineDeadError("shutting down: no new requests")
        assert self.client is not None
        return self.client

    def acquire(self) -> None:
        """Keep the engine from being unloaded until `release`."""
        self._stop_idling()
        self._n_users += 1

    def release(self) -> None:
        """End one `acquire`. The idle time starts with the last `release`."""
        self._n_users -= 1
        self._start_idling()

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Keep the engine from being unloaded inside the `with` block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    async def close(self) -> None:
        """Stop the engine permanently. Idempotent."""
        self._closed = True
        self._stop_idling()
        if self._change is not None:
            await asyncio.wait({self._change})
        if self.client is not None:
            await asyncio.to_thread(self.client.close)

    def _begin(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a load or unload; none is in progress."""
        self._change = task = asyncio.ensure_future(change)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[None]) -> None:
        if self._change is task:
            self._change = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved: each waiter gets it, and there may be no waiter
        self._start_idling()

    async def _load(self) -> None:
        self.client = await asyncio.to_thread(self._start)
        self.max_model_len = self.client.limits.max_model_len

    async def _unload(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await asyncio.to_thread(client.close)
            log.info("unloaded %s: no request for %s s", self._name, self._idle_unload_s)

    def _start_idling(self) -> None:
        self._stop_idling()
        if self._idle_unload_s is not None and self._n_users == 0 and not self._closed:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_unload_s, self._on_idle)

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _on_idle(self) -> None:
        """Unload the engine. A dead engine stays, so that health probes keep reporting it."""
        if self.client is not None and self.client.error is None and self._change is None:
            self._begin(self._unload())
