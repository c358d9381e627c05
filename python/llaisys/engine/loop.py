"""The engine thread: inbox -> plan -> run -> settle -> outputs. Builds, uses and closes the core on itself.

Idle is blocked on the inbox; there is no polling. Whatever ends the loop, every open request gets exactly one
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

from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.grammar import Grammars
from llaisys.engine.limits import Limits
from llaisys.engine.outputs import EngineOutput, refusal
from llaisys.engine.request import BrokenInvariant, EngineRequest
from llaisys.engine.sessions import SessionAnswer
from llaisys.engine.settings import WorkerSettings
from llaisys.engine.watch import Watch
from llaisys.engine.wire import Ask, Cancel, Recall, Recalled, Shutdown, Submit
from llaisys.engine.worker import open_worker
from llaisys.errors import EngineDeadError, InvariantError, LlaisysError
from llaisys.stats import EngineStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wake:
    """File work of a session is done."""


Message: TypeAlias = Submit | Cancel | Ask | Recall | Shutdown | _Wake


@dataclass(frozen=True, slots=True)
class Listener:
    """How the loop speaks; all are called on the engine thread and must not raise.

    - `step`: the outputs and the books after each step.
    - `answer`: of a call of sessions. `recalled`: where a request's time went.
    - `ended`: the loop is over, for this reason; no output follows. Called once; where the engine is stuck,
      on the thread that found it.
    - `clock`: monotonic seconds, the one that requests' times are of.
    """

    step: Callable[[list[EngineOutput], EngineStats], None]
    answer: Callable[[SessionAnswer], None]
    recalled: Callable[[Recalled], None]
    ended: Callable[[EngineDeadError], None]
    clock: Callable[[], float]


class EngineLoop:
    """One thread, one engine, one inbox. `inbox_max` bounds the messages that wait for the next step."""

    def __init__(
        self, build: Callable[[], LLMEngine], listener: Listener, inbox_max: int, watch: Watch | None = None
    ) -> None:
        self._build = build
        self._listener = listener
        self._watch = watch
        self._end: Future[EngineDeadError] = Future()  # whoever sets it tells the listener
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inbox_max = inbox_max
        self._built: Future[LLMEngine] = Future()
        # A daemon, so that a forgotten engine does not hold up the interpreter's exit: `EngineClient` closes
        # it from an exit hook, which runs while threads still can, and waits for its end.
        self._thread = threading.Thread(target=self._run, name="llaisys-engine", daemon=True)

    def start(self) -> Limits:
        """Starts the thread and waits until the engine stands: gives its limits. Raises what its
        building raised.
        """
        self._thread.start()
        try:
            return self._built.result().limits
        except BaseException:  # Ctrl-C too: then the thread is told to end when it has built
            self.stop()
            raise

    def send(self, message: Submit | Cancel | Ask | Recall) -> None:
        """Leaves a message for the next step. Raises queue.Full beyond `inbox_max`."""
        if self._inbox.qsize() >= self._inbox_max:
            raise queue.Full
        self._inbox.put(message)

    def stop(self) -> None:
        """Ends the loop after the step in progress, and waits for it (not on the engine thread itself).

        Always has room in the inbox: a full one must not keep an engine alive.
        """
        self._inbox.put(Shutdown())
        stuck = self._watch is not None and self._watch.stuck  # then it may never end
        if threading.current_thread() is not self._thread and not stuck:
            self._thread.join()

    def _tell_end(self, error: EngineDeadError) -> None:
        """To the listener, for the first that comes."""
        with contextlib.suppress(InvalidStateError):
            self._end.set_result(error)
            self._listener.ended(error)

    def _run(self) -> None:
        try:
            engine = self._build()
            if self._watch is not None:
                self._watch.begin(engine, self._tell_end)
        except BaseException as error:  # noqa: BLE001 -- the starter gets it, whatever it is
            self._built.set_exception(error)
            return
        self._built.set_result(engine)
        cause = EngineDeadError("shutting down")
        try:
            self._serve(engine)
        except BaseException as error:  # a panic is one too; nothing may pass silently
            log.exception("the engine is dead")
            cause = error if isinstance(error, EngineDeadError) else _dead(error)
        self._tell_end(cause)
        try:
            if self._watch is not None:
                self._watch.end()
            engine.close()
        except BaseException:  # the end is told already; the log has the rest
            log.exception("closing the engine failed")

    def _serve(self, engine: LLMEngine) -> None:
        """Until Shutdown, or until something that one request cannot be blamed for raises."""
        calls = engine.session_calls
        calls.wake = lambda: self._inbox.put(_Wake())
        while True:
            refused: list[EngineOutput] = []
            for message in self._take(engine.wait_s()):
                match message:
                    case Submit(request):
                        refused += _submit(engine, request)
                    case Cancel(request_id, index, asked_s):
                        if engine.cancel(request_id, index):
                            engine.tally.cancelled(time.monotonic() - asked_s)
                    case Ask(call):
                        calls.call(call)
                    case Recall(call_id, request_id):
                        stories = engine.stories(request_id, self._listener.clock())
                        self._listener.recalled(Recalled(call_id, stories))
                    case Shutdown():
                        return
            calls.turn()
            now_s = self._listener.clock()
            outputs = engine.step(now_s) if engine.wait_s() is not None else []
            stats = engine.stats()
            if self._end.done():  # it was given up while it was in there
                return
            self._listener.step(refused + outputs, stats)
            for answer in calls.take_answers():  # after the books that it changed
                self._listener.answer(answer)
            if self._watch is not None:
                self._watch.report(engine, stats, now_s)

    def _take(self, wait_s: float | None) -> Iterator[Message]:
        """All messages that are there; waits so long for the first (None: until there is one)."""
        try:
            yield self._inbox.get(block=wait_s != 0, timeout=wait_s or None)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return


def build_engine(
    settings: WorkerSettings, limits: Limits, seed: int, grammars: Grammars | None = None
) -> LLMEngine:
    """Loads the model. Runs on the engine thread: the core belongs to the thread that made it."""
    worker = open_worker(settings)
    limits = limits.with_cells(worker.n_cells)
    log.info("loaded %s: %s, context %d tokens", settings.path, worker.describe(), limits.max_model_len)
    return LLMEngine(Executor(worker), limits, seed, grammars)


def _submit(engine: LLMEngine, request: EngineRequest) -> list[EngineOutput]:
    """Nothing, or the refusal as the request's only output."""
    try:
        engine.submit(request)
    except EngineDeadError:
        raise
    except LlaisysError as error:
        return [refusal(request.request_id, error)]
    return []


def _dead(error: BaseException) -> EngineDeadError:
    kind = InvariantError if isinstance(error, BrokenInvariant) else EngineDeadError
    dead = kind(f"the engine is dead: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead
