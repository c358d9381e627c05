"""What follows when the core's watchdog finds the engine stuck: it is said, with what is known, and ended.

Lives in the engine's process (and in the server's for its event loop, if that is another), on a thread that
only waits for the verdict. The watchdog itself is a native thread: it needs no interpreter to find out that
this one has stopped.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from llaisys.engine.engine import LLMEngine
from llaisys.engine.worker import loop_watchdog
from llaisys.errors import EngineDeadError
from llaisys.stats import EngineStats

if TYPE_CHECKING:
    from llaisys.engine.worker import Watchdog

# A verdict that nobody acts on ends the process, with code 70, after so many seconds.
ACT_S = 10.0
# The most requests of a kind that a snapshot lists.
_LISTED = 16
_MEANINGS = {
    "V1": "a decode has begun no layer for too long: the core",
    "V2": "requests wait, none runs and none was let in: sequence ids or KV cells",
    "V3": "requests run, and none got a token or ended: the steps",
    "V4": "a request waits beyond its deadline: the queue",
    "V5": "the event loop did not come round: what it is busy with",
}

log = logging.getLogger(__name__)


class Watch:
    """One engine's watchdog. `begin` and `report` are the engine thread's, `beat` the event loop's.

    - `window_s`: seconds without a layer, a token or a beat; a sixth of it: without an admission, or past a
      deadline. A sixth without a beat is no verdict: the event loop is late, which is logged.
    - `exits`: the process belongs to the engine and ends with it, acted upon or not.
    """

    def __init__(self, window_s: float, *, exits: bool) -> None:
        self._window_s = window_s
        self._exit_after_s = ACT_S if exits else None
        self._watchdog: Watchdog | None = None
        self._engine: LLMEngine | None = None
        self._stats = EngineStats()
        self._on_verdict: Callable[[EngineDeadError], None] = lambda _: None
        self._beat_s, self._loop_thread = 0.0, 0
        self.stuck = False

    def begin(self, engine: LLMEngine, on_verdict: Callable[[EngineDeadError], None]) -> None:
        """Starts watching. `on_verdict` is called once, on a thread of its own."""
        self._engine, self._stats = engine, engine.stats()
        self._start(engine.worker.watchdog(self._window_s, self._exit_after_s), on_verdict)

    def begin_loop(self, on_verdict: Callable[[EngineDeadError], None]) -> None:
        """Starts watching the event loop alone: the engine's own process watches the engine."""
        self._start(loop_watchdog(self._window_s, self._exit_after_s), on_verdict)

    def _start(self, watchdog: Watchdog, on_verdict: Callable[[EngineDeadError], None]) -> None:
        self._watchdog, self._on_verdict = watchdog, on_verdict
        threading.Thread(target=self._wait, name="llaisys-verdict", daemon=True).start()

    def report(self, engine: LLMEngine, stats: EngineStats, now_s: float) -> None:
        """The engine's numbers, after each of its turns."""
        if self._watchdog is None:
            return
        self._stats = stats
        deadline_s = engine.requests.waiting.first_deadline_s()
        self._watchdog.report(
            waiting=len(engine.requests.waiting),
            running=stats.num_running,
            seconds_to_deadline=None if deadline_s is None else deadline_s - now_s,
            predicted_step_s=engine.longest_step_s,
        )

    def beat(self) -> None:
        """The event loop came round. To be called on its thread."""
        if self._watchdog is not None:
            self._beat_s, self._loop_thread = time.monotonic(), threading.get_ident()
            self._watchdog.beat()

    def end(self) -> None:
        """No verdict any more."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _wait(self) -> None:
        watchdog, engine = self._watchdog, self._engine
        assert watchdog is not None
        while (verdict := watchdog.verdict) is None:
            if not os.read(watchdog.fileno(), 1):  # it ended without one
                return
            if watchdog.verdict is None:
                self._report_late_loop()
        self.stuck = True
        books = "  its books are in the engine's process" if engine is None else self._snapshot(engine)
        log.critical("the engine is stuck (%s): %s\n%s", verdict, _MEANINGS[verdict], books)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        self._on_verdict(EngineDeadError(f"the engine is stuck: {verdict}"))

    def _report_late_loop(self) -> None:
        """Logs how late the event loop is and what holds it, once each time that it is late."""
        frame = sys._current_frames().get(self._loop_thread)
        stack = "  (its thread has ended)" if frame is None else "".join(traceback.format_stack(frame))
        log.warning(
            "the event loop is late: it last came round %.1f s ago; after %g s the process is stuck (V5) and "
            "ends. It is in:\n%s",
            time.monotonic() - self._beat_s,
            self._window_s,
            stack.rstrip(),
        )

    def _snapshot(self, engine: LLMEngine) -> str:
        """Leases, queue, cells and the newest plan; numbers only. Nothing here waits for the engine."""
        requests, stats = engine.requests, self._stats
        waiting = [each for line in [*requests.waiting.lines.values()] for each in line]
        return "\n".join(
            [
                f"  sequence ids: {engine.limits.max_num_seqs}, lent to the running: {len(requests.running)}",
                *(
                    f"    request {r.ordinal}: {r.state}, {r.num_computed} of {len(r.token_ids)} tokens"
                    for r in requests.running[:_LISTED]
                ),
                f"  queue: {len(waiting)}; waiting after the newest step: {stats.waiting_by_reason}",
                *(
                    f"    request {r.ordinal}: {len(r.token_ids)} tokens, preempted {r.num_preempted} times"
                    for r in waiting[:_LISTED]
                ),
                f"  KV cells: {stats.kv_cells}, {stats.kv_cells_used} used, "
                f"{stats.kv_cells_retained} cached, {stats.kv_cells_free} free",
                f"  newest step ({stats.num_steps}): {stats.step_prefill_tokens} prompt tokens, "
                f"{stats.step_decode_tokens} decoding",
            ]
        )
