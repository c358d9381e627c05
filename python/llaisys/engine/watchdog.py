"""EngineWatchdog: ends an engine that the core's watchdog finds stuck, after logging a snapshot of its state.

There is one in the engine's process, and one for the event loop if the server is another process. Its thread
only waits for a stall reason. The watchdog itself is a native thread, so that it also detects a blocked
interpreter.
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
from typing import TYPE_CHECKING, TypeAlias

from llaisys.engine.encoder_engine import EncoderEngine
from llaisys.engine.engine import LLMEngine
from llaisys.engine.worker import loop_watchdog
from llaisys.errors import EngineDeadError
from llaisys.stats import EngineStats

if TYPE_CHECKING:
    from llaisys.engine.worker import Watchdog

# The engine of a decoder or of an encoder.
Engine: TypeAlias = LLMEngine | EncoderEngine

# Seconds from a stall until the watchdog ends the process (exit code 70), unless it is stopped before.
EXIT_AFTER_S = 10.0
# Maximum number of running and of waiting requests in a snapshot.
_LISTED_MAX = 16
_MEANINGS = {
    "V1": "a decode has begun no layer for too long; check the core",
    "V2": "requests wait, none runs and none was admitted; check sequence ids and KV cells",
    "V3": "requests run, but none got a token or ended; check the steps",
    "V4": "a request waits beyond its deadline; check the queue",
    "V5": "the event loop has made no iteration; check its stack",
}

log = logging.getLogger(__name__)


class EngineWatchdog:
    """The watchdog of one engine. `start` and `report` run on the engine thread, `beat` on the event loop.

    - `window_s`: seconds without a layer, a token or a heartbeat after which the engine counts as stuck. For
      admissions and deadlines it is a sixth of that. An event loop without a heartbeat for a sixth is logged
      as late.
    - `exits`: the watchdog ends this process EXIT_AFTER_S after a stall, unless `stop` is called before.
    """

    def __init__(self, window_s: float, *, exits: bool) -> None:
        self._window_s = window_s
        self._exit_after_s = EXIT_AFTER_S if exits else None
        self._watchdog: Watchdog | None = None
        self._engine: Engine | None = None
        self._stats = EngineStats()
        self._on_stuck: Callable[[EngineDeadError], None] = lambda _: None
        self._beat_s, self._loop_thread = 0.0, 0
        self.is_stuck = False

    def start(self, engine: Engine, on_stuck: Callable[[EngineDeadError], None]) -> None:
        """Watch an engine. `on_stuck` is called once, on the watchdog's thread."""
        self._engine, self._stats = engine, engine.stats()
        self._start(engine.worker.watchdog(self._window_s, self._exit_after_s), on_stuck)

    def start_for_event_loop(self, on_stuck: Callable[[EngineDeadError], None]) -> None:
        """Watch only the event loop; the process of the engine watches the engine."""
        self._start(loop_watchdog(self._window_s, self._exit_after_s), on_stuck)

    def _start(self, watchdog: Watchdog, on_stuck: Callable[[EngineDeadError], None]) -> None:
        self._watchdog, self._on_stuck = watchdog, on_stuck
        threading.Thread(target=self._wait, name="llaisys-watchdog", daemon=True).start()

    def report(self, engine: Engine, stats: EngineStats | None, now_s: float) -> None:
        """Report the engine's numbers, after each iteration of its loop. `stats`: as in `EngineListener`."""
        if self._watchdog is None:
            return
        if stats is not None:
            self._stats = stats
        deadline_s = engine.requests.waiting.first_deadline_s()
        self._watchdog.report(
            waiting=len(engine.requests.waiting),
            running=len(engine.requests.running),
            seconds_to_deadline=None if deadline_s is None else deadline_s - now_s,
            predicted_step_s=engine.longest_step_s,
        )

    def beat(self) -> None:
        """Report a heartbeat of the event loop. Call it on the event loop's thread."""
        if self._watchdog is not None:
            self._beat_s, self._loop_thread = time.monotonic(), threading.get_ident()
            self._watchdog.beat()

    def stop(self) -> None:
        """Stop watching."""
        if self._watchdog is not None:
            self._watchdog.close()

    def _wait(self) -> None:
        watchdog, engine = self._watchdog, self._engine
        assert watchdog is not None
        while (reason := watchdog.stall_reason) is None:
            if not os.read(watchdog.fileno(), 1):  # end-of-file: closed without a stall
                return
            if watchdog.stall_reason is None:
                self._log_late_event_loop()
        self.is_stuck = True
        snapshot = "  its state is in the engine process" if engine is None else self._snapshot(engine)
        log.critical("the engine is stuck (%s): %s\n%s", reason, _MEANINGS[reason], snapshot)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        self._on_stuck(EngineDeadError(f"the engine is stuck: {reason}"))

    def _log_late_event_loop(self) -> None:
        """Log how late the event loop is, with its stack; once per delay."""
        frame = sys._current_frames().get(self._loop_thread)
        stack = "  (its thread has ended)" if frame is None else "".join(traceback.format_stack(frame))
        log.warning(
            "the event loop is late: its last iteration was %.1f s ago; after %g s the process counts as "
            "stuck (V5) and ends. Its stack:\n%s",
            time.monotonic() - self._beat_s,
            self._window_s,
            stack.rstrip(),
        )

    def _snapshot(self, engine: Engine) -> str:
        """Return requests, queue, cells and the newest step as text with numbers only.

        Never waits for the engine, whose thread is blocked.
        """
        requests, recorder, stats = engine.requests, engine.stats_recorder, self._stats
        waiting = [each for queue in [*requests.waiting.client_queues.values()] for each in queue]
        n_running = len(requests.running)
        return "\n".join(
            [
                f"  sequence ids: {engine.limits.max_num_seqs}, acquired by running requests: {n_running}",
                *(
                    f"    request {r.ordinal}: {r.state}, {r.num_computed} of {len(r.token_ids)} tokens"
                    for r in requests.running[:_LISTED_MAX]
                ),
                f"  queue: {len(waiting)}; waiting after the newest step: {stats.waiting_by_reason}",
                *(
                    f"    request {r.ordinal}: {len(r.token_ids)} tokens, preempted {r.num_preempted} times"
                    for r in waiting[:_LISTED_MAX]
                ),
                f"  KV cells: {stats.kv_cells}, {stats.kv_cells_used} used, "
                f"{stats.kv_cells_retained} cached, {stats.kv_cells_free} free",
                f"  newest step ({recorder.num_steps}): {recorder.step_prefill_tokens} prompt tokens, "
                f"{recorder.step_decode_tokens} decoding",
            ]
        )
