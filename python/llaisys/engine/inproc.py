"""The engine on a thread of this process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import partial

from llaisys.engine.client import Deliver, EngineClient
from llaisys.engine.engine import LLMEngine
from llaisys.engine.limits import Limits
from llaisys.engine.loop import EngineLoop, Listener
from llaisys.engine.watch import Watch


class InprocClient(EngineClient):
    """An engine thread of this process; `deliver` is called on it. Once dead it stays dead."""

    def __init__(
        self,
        build: Callable[[], LLMEngine],
        limits: Limits,
        deliver: Deliver,
        clock: Callable[[], float] = time.monotonic,
        watch: Watch | None = None,
    ) -> None:
        """Builds the engine on its own thread and waits for it. Raises what `build` raises."""
        super().__init__(limits, deliver, watch)
        ended = partial(self._ended, final=True)
        listener = Listener(self._step, self._answered, self._recalled, ended, clock)
        self._loop = EngineLoop(build, listener, self._inbox_max, watch)
        self._link = self._loop
        # From the start: a program that is interrupted while the model loads waits for the thread, too.
        atexit.register(self._close_at_exit)
        try:
            self._bound(self._loop.start())
        except BaseException:
            atexit.unregister(self._close_at_exit)
            raise

    def _stop(self) -> None:
        self._loop.stop()
