"""EngineClient: the only door to an engine, whether it runs on a thread of this process or in its own."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.outputs import EngineOutput, refusal
from llaisys.engine.request import EngineRequest
from llaisys.engine.sessions import SessionAnswer, SessionCall
from llaisys.engine.watch import Watch
from llaisys.engine.wire import Ask, Cancel, Recall, Recalled, Submit
from llaisys.errors import (
    EngineDeadError,
    ExhaustedError,
    InvariantError,
    QueueFullError,
    RejectedError,
)
from llaisys.shares import Shares
from llaisys.stats import EngineStats
from llaisys.story import Story
from llaisys.types import CHOICES_MAX, Pooling, RequestId, SamplingParams, SessionInfo

Deliver: TypeAlias = Callable[[list[EngineOutput]], None]

# Calls that may be open at the same time: one of a session may hold a piece of a file.
CALLS_MAX = 16


class Link(Protocol):
    """One living engine, as messages reach it."""

    def send(self, message: Submit | Cancel | Ask | Recall) -> None:
        """Leaves a message for the engine's next step; from any thread, never waits."""


class EngineClient(ABC):
    """Submits to an engine, and hears from it once a step: the interface, and the books of both forms.

    Owns the set of open request ids: an id is in it from `submit` until its last output, and whoever takes it
    out (the engine's side, or a `submit` that finds the engine dead) gives the request its one end. `submit`
    and `cancel` may be called from any thread; `deliver` is called on a thread of the client's own.

    `_link` is the engine that lives now, None while there is none; a message to one that has died is lost,
    and its request has been ended. A process forked from the owner has no engine.
    """

    def __init__(self, limits: Limits, deliver: Deliver, watch: Watch | None) -> None:
        """`watch`: of this process."""
        self._watch = watch
        self._limits = limits
        self._deliver = deliver
        # Open requests, and whose they are.
        self._open: dict[RequestId, str] = {}
        # What was cancelled of each open request: its choices, or None for all of them.
        self._cancelled: dict[RequestId, set[int | None]] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._callers: dict[int, str] = {}
        self._call_ids = itertools.count()
        self._open_max = limits.max_num_seqs + limits.max_num_queued_reqs
        if limits.n_clients > 1:  # as many that were preempted for a client's share
            self._open_max += limits.max_num_seqs
        self._open_shares = Shares(self._open_max, limits.n_clients)
        self._link: Link | None = None
        self._error: EngineDeadError | None = None
        self._is_lost = False
        self._stats = EngineStats(kv_cells=limits.n_cells, kv_cells_free=limits.n_cells)
        self._num_ended_wrong = 0
        self._owner = os.getpid()

    @property
    def limits(self) -> Limits:
        """The engine's bounds."""
        return self._limits

    def _bound(self, limits: Limits) -> None:
        """Takes the bounds of an engine that has been built."""
        self._limits = limits
        self._stats = EngineStats(kv_cells=limits.n_cells, kv_cells_free=limits.n_cells)

    @property
    def error(self) -> EngineDeadError | None:
        """Why there is no engine now (dead, restarting or shutting down); None while it lives."""
        return self._error

    @property
    def is_lost(self) -> bool:
        """True once the engine is dead and is not going to be restarted, or this is closed."""
        return self._is_lost

    def check(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, pooling: Pooling | None = None
    ) -> None:
        """Raises RejectedError or ContextLengthError for a request that could never run."""
        token_limit(prompt_ids, params, self._limits, pooling=pooling)

    def submit(self, request: EngineRequest) -> None:
        """Hands a request over; its outputs follow through `deliver`.

        Raises RejectedError or ContextLengthError (could never run), QueueFullError, EngineDeadError. A queue
        that turns out full only at the engine is told by the request's one output instead.
        """
        link = self._link
        if link is None or not self._is_owner():
            raise self._why_not()
        self.check(request.prompt_token_ids, request.params, pooling=request.pooling)
        request_id = request.request_id
        if request_id in self._open:
            raise RejectedError(f"request id {request_id!r} is in use", param="request_id")
        if not self._has_place(request.client_id):
            raise self._full()
        self._open[request_id] = request.client_id
        try:
            link.send(Submit(request))
        except BaseException:
            self._take_out(request_id)
            raise
        if self._link is not link and self._take_out(request_id):
            raise self._why_not()  # it died meanwhile, and its end has not seen this request

    def cancel(self, request_id: RequestId, index: int | None = None) -> None:
        """Ends a request, or one choice of it, within one step; its ABORT output follows. An ended or unknown
        id is ignored."""
        link = self._link
        if link is None or not self._is_owner() or request_id not in self._open:
            return
        cancelled = self._cancelled.setdefault(request_id, set())
        if not {index, None} & cancelled:
            cancelled.add(index)
            link.send(Cancel(request_id, index, time.monotonic()))
        if request_id not in self._open:  # it ended meanwhile
            self._cancelled.pop(request_id, None)

    def call(self, call: SessionCall) -> Future[list[SessionInfo]]:
        """Asks for something of a client's sessions; its `call_id` is given here. The future, which cannot be
        cancelled, has the session (of `list`: all), or what refused it.

        Raises EngineDeadError, or ExhaustedError beyond CALLS_MAX open calls.
        """
        return self._ask(call.client_id, lambda call_id: Ask(replace(call, call_id=call_id)))

    def stories(self, request_id: RequestId, client_id: str = "") -> Future[dict[int, Story]]:
        """Where the time of a client's request went, by choice; empty for one that is not known (any more).
        Raises as `call`."""
        return self._ask(client_id, lambda call_id: Recall(call_id, request_id))

    def _ask(self, client_id: str, message: Callable[[int], Ask | Recall]) -> Future[Any]:
        link = self._link
        if link is None or not self._is_owner():
            raise self._why_not()
        self._callers = {id: client for id, client in self._callers.items() if id in self._calls}
        shares = Shares(CALLS_MAX, self._limits.n_clients)
        if not shares.allows(Counter(self._callers.values()), client_id):
            raise ExhaustedError(
                f"{shares.most} calls of sessions or timelines are under way, no more may be: try again"
            )
        call_id, future = next(self._call_ids), Future[Any]()
        future.set_running_or_notify_cancel()
        self._callers[call_id] = client_id
        self._calls[call_id] = future
        try:
            link.send(message(call_id))
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        if self._link is not link and self._calls.pop(call_id, None) is not None:
            raise self._why_not()  # as in `submit`
        return future

    def stats(self) -> EngineStats:
        """The engine's books after its newest step."""
        return self._stats

    @property
    def num_violations(self) -> int:
        """Times that the books of its engines were found wrong, whether that ended one or not."""
        return self._num_ended_wrong + self._stats.num_violations

    def refusal(self, client_id: str = "") -> QueueFullError | None:
        """Why no request of a client would be taken now: all its places are, or (of a single client) as many
        wait as may after the newest step, which let in whom it could. None: one may be."""
        limits = self._limits
        is_queue_full = limits.n_clients < 2 and 0 < limits.max_num_queued_reqs <= self._stats.num_queued
        is_full = is_queue_full or not self._has_place(client_id)
        return self._full() if is_full and self._link is not None else None

    def _has_place(self, client_id: str) -> bool:
        """True if one more request of the client may be open."""
        if len(self._open) < self._open_shares.reserved:
            return True
        return self._open_shares.allows(Counter(list(self._open.values())), client_id)

    @property
    def stuck(self) -> bool:
        """True once the watchdog has given up this process, which should end, then."""
        return self._watch is not None and self._watch.stuck

    def beat(self) -> None:
        """The caller's event loop came round; once this is called, it must be called again and again."""
        if self._watch is not None:
            self._watch.beat()

    def close(self) -> None:
        """Ends the engine and every open request (EngineDeadError: shutting down); waits for it.

        Idempotent, and nothing in a process that was forked from the owner.
        """
        atexit.unregister(self._close_at_exit)
        if self._is_owner():
            self._stop()

    # --- for the two forms ---

    def _close_at_exit(self) -> None:
        """Not cut short by Ctrl-C: a native thread that comes back into an interpreter that has ended aborts
        the process. It takes a step at most."""
        while True:
            try:
                self.close()
                return
            except KeyboardInterrupt:
                continue

    @abstractmethod
    def _stop(self) -> None:
        """Ends the engine and waits for its end."""

    @property
    def _inbox_max(self) -> int:
        """Messages that may wait for a step: those of all open requests and calls, and of as many that follow
        the ones that end meanwhile. A request sends one Submit, a Cancel for each of its choices (`check`
        bounds them) and one for all of them."""
        n_choices = min(CHOICES_MAX, self._limits.max_num_seqs)
        return 2 * ((n_choices + 2) * self._open_max + CALLS_MAX)

    def _answered(self, answer: SessionAnswer) -> None:
        future = self._calls.pop(answer.call_id, None)
        if future is None:
            return
        if answer.error is None:
            future.set_result(answer.sessions)
        else:
            future.set_exception(answer.error)

    def _recalled(self, recalled: Recalled) -> None:
        future = self._calls.pop(recalled.call_id, None)
        if future is not None:
            future.set_result(recalled.stories)

    def _step(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        self._stats = stats
        for output in outputs:
            if output.last:
                self._take_out(output.request_id)
        if outputs:
            self._deliver(outputs)

    def _ended(self, error: EngineDeadError, *, final: bool = False) -> None:
        """The link is dead: every open request gets its end. `final`: there is not going to be another."""
        if self._link is not None and isinstance(error, InvariantError):
            self._num_ended_wrong += 1
        self._error = error
        self._link = None
        self._is_lost = final
        self._stats = EngineStats(kv_cells=self._limits.n_cells, kv_cells_free=self._limits.n_cells)
        last = [
            refusal(request_id, _copy(error)) for request_id in list(self._open) if self._take_out(request_id)
        ]
        if last:
            self._deliver(last)
        for call_id in list(self._calls):
            future = self._calls.pop(call_id, None)
            if future is not None:
                future.set_exception(_copy(error))

    # --- inside ---

    def _full(self) -> QueueFullError:
        limits, shares = self._limits, self._open_shares
        why = f"{limits.max_num_seqs} requests may run and {limits.max_num_queued_reqs} wait"
        if shares.n_clients > 1:
            why = f"a client may have {shares.reserved} requests open, up to {shares.most} if it is alone"
        return QueueFullError(f"all places are taken: {why}", retry_after_s=self._stats.queue_s)

    def _is_owner(self) -> bool:
        return os.getpid() == self._owner

    def _why_not(self) -> EngineDeadError:
        if not self._is_owner():
            return EngineDeadError("the engine belongs to the process that this one was forked from")
        return _copy(self._error or EngineDeadError("the engine was restarted in this moment; try again"))

    def _take_out(self, request_id: RequestId) -> bool:
        """True for the one caller that finds the id still open."""
        try:
            del self._open[request_id]
        except KeyError:
            return False
        self._cancelled.pop(request_id, None)
        return True


def _copy(error: EngineDeadError) -> EngineDeadError:
    """One for each request that raises it: a raised exception collects its raiser's frames."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy
