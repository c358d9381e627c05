"""EngineLoop: the engine thread, which reads the inbox, runs the engine's steps and reports their outputs.

The thread builds, uses and closes the engine, because the core belongs to the thread that created it. An
idle thread blocks on the inbox; it never polls. Whatever ends the loop, every open request gets exactly one
last output, and the engine is closed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeAlias

from llaisys.engine.encoder_engine import EncoderEngine
from llaisys.engine.encoder_worker import open_encoder
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput, rejected_output
from llaisys.engine.executor import Executor
from llaisys.engine.grammar import GrammarCompiler
from llaisys.engine.limits import Limits
from llaisys.engine.memory import EngineSizing, WorkerSettings
from llaisys.engine.messages import (
    Call,
    Cancel,
    LoadLora,
    PrefixCacheReset,
    Reply,
    ResetPrefixCache,
    Shutdown,
    Submit,
    TimelineReply,
    TimelineRequest,
    UnloadLora,
)
from llaisys.engine.request import BrokenInvariant, EngineRequest
from llaisys.engine.sessions.manager import SessionReply, SessionRequest
from llaisys.engine.spec_decode.draft_model import DraftModelProposer
from llaisys.engine.spec_decode.speculator import make_speculator
from llaisys.engine.watchdog import Engine, EngineWatchdog
from llaisys.engine.worker import open_worker
from llaisys.errors import EngineDeadError, InvariantError, LlaisysError
from llaisys.stats import EngineStats

log = logging.getLogger(__name__)

# While steps only continue the running requests, their stats are reported this often. Making them takes
# up to 0.1 ms, a fifth of what a step with one request takes outside of the core.
STATS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Wake:
    """File I/O of a session transfer or of the disk tier is done."""


Message: TypeAlias = Submit | Cancel | Call | Shutdown | _Wake


@dataclass(frozen=True, slots=True)
class EngineListener:
    """The callbacks of an engine loop. All run on the engine thread and must not raise.

    - `on_step`: the outputs of a step, and the engine's stats after it. None for the stats: since the last
      ones steps only continued the running requests, for less than STATS_INTERVAL_S.
    - `on_session_reply`: the reply to a SessionRequest. `on_reply`: the reply to any other call.
    - `on_end`: called once with the reason when the loop has ended. No output follows. If the engine is
      stuck, the call is on the watchdog's thread.
    - `clock`: monotonic seconds, on the same scale as the requests' times.
    """

    on_step: Callable[[list[EngineOutput], EngineStats | None], None]
    on_session_reply: Callable[[SessionReply], None]
    on_reply: Callable[[Reply], None]
    on_end: Callable[[EngineDeadError], None]
    clock: Callable[[], float]


class EngineLoop:
    """One thread, one engine, one inbox. `inbox_max` bounds the messages that wait for the next step."""

    def __init__(
        self,
        build: Callable[[], Engine],
        listener: EngineListener,
        inbox_max: int,
        watchdog: EngineWatchdog | None = None,
    ) -> None:
        self._build = build
        self._listener = listener
        self._watchdog = watchdog
        self._end: Future[EngineDeadError] = Future()  # set once; the thread that sets it calls `on_end`
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inbox_max = inbox_max
        self._built: Future[Engine] = Future()
        # When the newest stats were made, and how many requests ran, waited and were parked then.
        self._stats_s = float("-inf")
        self._n_requests = (0, 0, 0)
        # A daemon thread, so that an engine that was never closed does not block the exit of the interpreter.
        # `EngineClient` closes it from an exit hook, which runs while threads still can, and waits for it.
        self._thread = threading.Thread(target=self._run, name="llaisys-engine", daemon=True)

    def start(self) -> Limits:
        """Start the thread and wait until the engine is built; return its limits.

        Raises the exception of `build`.
        """
        self._thread.start()
        try:
            return self._built.result().limits
        except BaseException:  # also on Ctrl-C: the thread then ends once it has built the engine
            self.stop()
            raise

    def send(self, message: Submit | Cancel | Call) -> None:
        """Queue a message for the next step. Raises queue.Full if `inbox_max` messages wait."""
        if self._inbox.qsize() >= self._inbox_max:
            raise queue.Full
        self._inbox.put(message)

    def stop(self) -> None:
        """End the loop after the step in progress, and wait for it unless called on the engine thread.

        The shutdown message is exempt from `inbox_max`, so that a full inbox does not keep an engine alive.
        """
        self._inbox.put(Shutdown())
        is_stuck = self._watchdog is not None and self._watchdog.is_stuck  # the thread may never end
        if threading.current_thread() is not self._thread and not is_stuck:
            self._thread.join()

    def _report_end(self, error: EngineDeadError) -> None:
        """Report the end to the listener. Only the first call has an effect."""
        with contextlib.suppress(InvalidStateError):
            self._end.set_result(error)
            self._listener.on_end(error)

    def _run(self) -> None:
        try:
            engine = self._build()
            if self._watchdog is not None:
                self._watchdog.start(engine, self._report_end)
        except BaseException as error:  # noqa: BLE001 -- passed on to `start`
            self._built.set_exception(error)
            return
        self._built.set_result(engine)
        cause, is_sound = EngineDeadError("shutting down"), False
        try:
            self._serve(engine)
            is_sound = not self._end.done()
        except BaseException as error:  # includes a panic of the core
            log.exception("the engine is dead")
            cause = error if isinstance(error, EngineDeadError) else _dead_error(error)
        self._report_end(cause)
        try:
            if self._watchdog is not None:
                self._watchdog.stop()
            try:
                if is_sound and engine.disk_cache is not None:
                    engine.disk_cache.drain()
            finally:
                engine.close()
        except BaseException:  # the end was reported above
            log.exception("closing the engine failed")

    def _serve(self, engine: Engine) -> None:
        """Run until Shutdown, or until an exception that is not the fault of one request."""
        sessions = engine.session_requests
        sessions.wake = wake = lambda: self._inbox.put(_Wake())
        if engine.disk_cache is not None:
            engine.disk_cache.wake = wake
        while True:
            rejected: list[EngineOutput] = []
            has_messages = False
            for message in self._receive(engine.wait_s()):
                has_messages = True
                match message:
                    case Submit(request):
                        rejected += _submit(engine, request)
                    case Cancel(request_id, index, asked_s):
                        if engine.cancel(request_id, index):
                            engine.stats_recorder.record_cancel(time.monotonic() - asked_s)
                    case SessionRequest():
                        sessions.handle(message)
                    case TimelineRequest(call_id, request_id):
                        timelines = engine.timelines(request_id, self._listener.clock())
                        self._listener.on_reply(TimelineReply(call_id, timelines))
                    case ResetPrefixCache(call_id):
                        self._listener.on_reply(PrefixCacheReset(call_id, engine.reset_prefix_cache()))
                    case LoadLora() | UnloadLora():
                        self._listener.on_reply(engine.loras.handle(message))
                    case Shutdown():
                        return
            sessions.continue_transfer()
            if engine.disk_cache is not None:
                engine.disk_cache.resume(is_idle=not engine.has_work())
            now_s = self._listener.clock()
            outputs = rejected + (engine.step(now_s) if engine.wait_s() is not None else [])
            if engine.kv_events is not None:
                engine.kv_events.publish()
            replies = sessions.pop_replies()
            has_changed = has_messages or bool(replies) or any(output.finish_reason for output in outputs)
            stats = self._due_stats(engine, now_s, has_changed=has_changed)
            if self._end.done():  # the watchdog reported the end during the step
                return
            self._listener.on_step(outputs, stats)
            for reply in replies:  # after the stats, which include these operations
                self._listener.on_session_reply(reply)
            if self._watchdog is not None:
                self._watchdog.report(engine, stats, now_s)

    def _due_stats(self, engine: Engine, now_s: float, *, has_changed: bool) -> EngineStats | None:
        """Return the engine's stats; None if only running requests continued and the newest are recent."""
        requests = engine.requests
        n_requests = (len(requests.running), len(requests.waiting), len(requests.parked))
        is_recent = now_s - self._stats_s < STATS_INTERVAL_S
        if is_recent and requests.running and n_requests == self._n_requests and not has_changed:
            return None
        self._stats_s, self._n_requests = now_s, n_requests
        return engine.stats()

    def _receive(self, wait_s: float | None) -> Iterator[Message]:
        """Yield all queued messages; wait up to `wait_s` seconds (None: no limit) for the first one."""
        try:
            yield self._inbox.get(block=wait_s != 0, timeout=wait_s or None)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return


def build_engine(sizing: EngineSizing, seed: int, grammar_compiler: GrammarCompiler | None = None) -> Engine:
    """Load the model. Call it on the engine thread, because the core belongs to the thread that created
    it."""
    settings = sizing.settings
    if settings.is_encoder:
        encoder = open_encoder(settings)
        log.info("loaded %s: %s", settings.path, encoder.describe())
        return EncoderEngine(encoder, sizing.limits)
    worker = open_worker(settings)
    limits = sizing.limits.with_cells(worker.n_cells)
    log.info("loaded %s: %s, context %d tokens", settings.path, worker.describe(), limits.max_model_len)
    speculator = None
    if sizing.speculation is not None:
        draft_model = None if sizing.draft_settings is None else _draft_model(sizing.draft_settings)
        speculator = make_speculator(sizing.speculation, worker.decode_seconds, draft_model)
    kv_events = None
    if sizing.kv_events is not None:
        # Imported here because pyzmq is optional.
        from llaisys.engine.kv_event_publisher import KvEventPublisher

        kv_events = KvEventPublisher(sizing.kv_events)
    engine = LLMEngine(Executor(worker), limits, seed, grammar_compiler, speculator, kv_events)
    if kv_events is not None:
        kv_events.blocks.lora_of = engine.loras.request_of
    return engine


def _draft_model(settings: WorkerSettings) -> DraftModelProposer:
    worker = open_worker(settings)
    log.info("loaded the draft model %s: %s", settings.path, worker.describe())
    return DraftModelProposer(worker, settings.n_batch, settings.max_model_len)


def _submit(engine: Engine, request: EngineRequest) -> list[EngineOutput]:
    """Submit a request. Return its single output if it is rejected, otherwise nothing."""
    try:
        engine.submit(request)
    except EngineDeadError:
        raise
    except LlaisysError as error:
        return [rejected_output(request.request_id, error)]
    return []


def _dead_error(error: BaseException) -> EngineDeadError:
    """Return the error of requests whose engine ended with `error`."""
    kind = InvariantError if isinstance(error, BrokenInvariant) else EngineDeadError
    dead = kind(f"the engine is dead: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead
