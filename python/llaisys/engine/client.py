"""EngineClient: the only door to an engine. In process; a form over IPC will stand behind the same calls."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from llaisys.config import Config
from llaisys.engine.capacity import Capacity, size
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.loop import Cancel, EngineLoop, Listener, Submit
from llaisys.engine.machine import available_bytes, usable_cores
from llaisys.engine.outputs import EngineOutput, refusal
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import open_worker
from llaisys.errors import EngineDeadError, QueueFullError, RejectedError
from llaisys.stats import EngineStats
from llaisys.types import ModelInfo, RequestId, SamplingParams

log = logging.getLogger(__name__)


class EngineClient:
    """Submits to an engine thread, and hears from it once a step.

    Owns the set of open request ids: an id is in it from `submit` until its last output, and whoever takes it
    out (the thread, or a `submit` that finds the engine dead) gives the request its one end. `submit` and
    `cancel` may be called from any thread; `deliver` is called on the engine thread.
    """

    def __init__(
        self,
        build: Callable[[], LLMEngine],
        limits: Limits,
        deliver: Callable[[list[EngineOutput]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Builds the engine on its own thread and waits for it. Raises what `build` raises."""
        self._limits = limits
        self._deliver = deliver
        self._open: set[RequestId] = set()
        self._cancelled: set[RequestId] = set()
        self._open_max = limits.max_num_seqs + limits.max_num_queued_reqs
        self._error: EngineDeadError | None = None
        self._stats = EngineStats(kv_cells=limits.n_cells)
        # An id sends one Submit and one Cancel; between two readings of the inbox at most `_open_max` ids are
        # open at first, and as many more may follow those that end.
        self._loop = EngineLoop(build, Listener(self._step, self._ended, clock), 4 * self._open_max)
        self._loop.start()
        atexit.register(self.close)

    @classmethod
    def start(
        cls, config: Config, info: ModelInfo, deliver: Callable[[list[EngineOutput]], None]
    ) -> EngineClient:
        """Sizes an engine for this machine and loads the model into it.

        Raises RejectedError or UnsupportedError: a setting or the model, by name.
        """
        capacity = size(config, info, available_bytes(), usable_cores())
        log.info("%s", capacity.summary)
        return cls(partial(_build, capacity, config.seed), capacity.limits, deliver)

    @property
    def limits(self) -> Limits:
        """The engine's bounds."""
        return self._limits

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is over (also: shutting down); None while it lives."""
        return self._error

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises RejectedError or ContextLengthError for a request that could never run."""
        token_limit(prompt_ids, params, self._limits)

    def submit(self, request: EngineRequest) -> None:
        """Hands a request over; its outputs follow through `deliver`.

        Raises RejectedError or ContextLengthError (could never run), QueueFullError, EngineDeadError. A queue
        that turns out full only at the engine is told by the request's one output instead.
        """
        if self._error is not None:
            raise _copy(self._error)
        self.check(request.prompt_token_ids, request.params)
        request_id = request.request_id
        if request_id in self._open:
            raise RejectedError(f"request id {request_id!r} is in use", param="request_id")
        if len(self._open) >= self._open_max:
            raise QueueFullError(
                f"all places are taken: {self._limits.max_num_seqs} requests may run and "
                f"{self._limits.max_num_queued_reqs} wait"
            )
        self._open.add(request_id)
        self._loop.send(Submit(request))
        if self._error is not None and self._take_out(request_id):
            raise _copy(self._error)  # it died meanwhile, and its end has not seen this request

    def cancel(self, request_id: RequestId, index: int | None = None) -> None:
        """Ends a request, or one choice of it, within one step; its ABORT output follows. An ended or unknown
        id is ignored."""
        if index is not None:
            self._loop.send(Cancel(request_id, index))
        elif request_id in self._open and request_id not in self._cancelled:
            self._cancelled.add(request_id)
            self._loop.send(Cancel(request_id))
            if request_id not in self._open:  # it ended meanwhile
                self._cancelled.discard(request_id)

    def stats(self) -> EngineStats:
        """The engine's books after its newest step."""
        return self._stats

    def close(self) -> None:
        """Ends the engine and every open request (EngineDeadError: shutting down); waits for it.

        Idempotent.
        """
        atexit.unregister(self.close)
        self._loop.stop()

    # --- inside ---

    def _take_out(self, request_id: RequestId) -> bool:
        """True for the one caller that finds the id still open."""
        try:
            self._open.remove(request_id)
        except KeyError:
            return False
        self._cancelled.discard(request_id)
        return True

    def _step(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        self._stats = stats
        for output in outputs:
            if output.last:
                self._take_out(output.request_id)
        if outputs:
            self._deliver(outputs)

    def _ended(self, error: EngineDeadError) -> None:
        self._error = error
        self._stats = EngineStats(kv_cells=self._limits.n_cells)
        last = [
            refusal(request_id, _copy(error)) for request_id in list(self._open) if self._take_out(request_id)
        ]
        if last:
            self._deliver(last)


def _copy(error: EngineDeadError) -> EngineDeadError:
    """One for each request that raises it: a raised exception collects its raiser's frames."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _build(capacity: Capacity, seed: int) -> LLMEngine:
    """Runs on the engine thread: the core belongs to the thread that made it."""
    worker = open_worker(capacity.settings)
    log.info("loaded %s: %s", capacity.settings.path, worker.describe())
    return LLMEngine(Executor(worker), capacity.limits, seed)
