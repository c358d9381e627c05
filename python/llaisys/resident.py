"""The engine of one model, which comes and goes: loaded when wanted, unloaded when nobody has been there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from llaisys.engine.client import EngineClient
from llaisys.errors import EngineDeadError, LlaisysError

log = logging.getLogger(__name__)


class ResidentEngine:
    """Loads at the first `load`, once however many wait; unloads after `idle_unload_s` without a holder.

    Belongs to one event loop; `start`, which may take long, runs on a thread. Invariant: while somebody holds
    it (`hold`) it is not unloaded.
    """

    def __init__(self, start: Callable[[], EngineClient], name: str, idle_unload_s: float | None) -> None:
        """`start` raises RejectedError or UnsupportedError (the model or a setting). `name`: for the log."""
        self._start = start
        self._name = name
        self._idle_unload_s = idle_unload_s
        self._n_holders = 0
        self._change: asyncio.Task[None] | None = None  # the loading or unloading that is under way
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self.client: EngineClient | None = None
        self.max_model_len: int | None = None  # of the last load, in tokens

    async def load(self) -> None:
        """Returns with the engine loaded; raises what `start` does, or EngineDeadError once closed."""
        while self.client is None:
            if self._closed:
                raise EngineDeadError("shutting down: no new requests")
            change = self._change
            # A change that is over stays `_change` until the loop has told us so, a turn later.
            await asyncio.shield(self._begin(self._load()) if change is None or change.done() else change)

    async def wanted(self) -> EngineClient:
        """The engine, for a request. What keeps it from loading is no fault of the request's."""
        try:
            await self.load()
        except LlaisysError as error:
            log.error("the model %s cannot be loaded: %s", self._name, error)
            raise EngineDeadError(f"the model cannot be loaded: {error}") from error
        assert self.client is not None
        return self.client

    def hold(self) -> None:
        """It stays loaded, or is going to be, until `release`."""
        self._stop_idling()
        self._n_holders += 1

    def release(self) -> None:
        """Undoes one `hold`; from the last one on the idle time counts."""
        self._n_holders -= 1
        self._start_idling()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """It stays loaded meanwhile."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    async def close(self) -> None:
        """Stops the engine, for good. Idempotent."""
        self._closed = True
        self._stop_idling()
        if self._change is not None:
            await asyncio.wait({self._change})
        if self.client is not None:
            await asyncio.to_thread(self.client.close)

    def _begin(self, change: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Makes a loading or an unloading the one that is under way; there is none."""
        self._change = task = asyncio.ensure_future(change)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Task[None]) -> None:
        if self._change is task:
            self._change = None
        if not task.cancelled():
            task.exception()  # it is told to whoever waits; if all have gone, to nobody
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
        if self._idle_unload_s is not None and self._n_holders == 0 and not self._closed:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._idle_unload_s, self._on_idle)

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _on_idle(self) -> None:
        """A dead engine stays, so that the probes go on saying so."""
        if self.client is not None and self.client.error is None and self._change is None:
            self._begin(self._unload())
