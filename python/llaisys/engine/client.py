"""EngineClient: the only interface to an engine. InprocClient: an engine on a thread of this process.

`process.py` has the client of an engine in a child process.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from llaisys.engine.engine_output import EngineOutput, rejected_output
from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.loop import EngineListener, EngineLoop
from llaisys.engine.messages import (
    Call,
    Cancel,
    LoadLora,
    LoraReply,
    PrefixCacheReset,
    Reply,
    ResetPrefixCache,
    Submit,
    TimelineReply,
    TimelineRequest,
    UnloadLora,
)
from llaisys.engine.request import EngineRequest
from llaisys.engine.sessions.manager import SessionReply, SessionRequest
from llaisys.engine.watchdog import Engine, EngineWatchdog
from llaisys.errors import (
    EngineDeadError,
    ExhaustedError,
    InvariantError,
    QueueFullError,
    RejectedError,
)
from llaisys.lora_request import LoRARequest
from llaisys.model_info import Pooling
from llaisys.outputs import RequestId
from llaisys.sampling_params import CHOICES_MAX, SamplingParams
from llaisys.session_info import SessionInfo
from llaisys.shares import Shares
from llaisys.stats import EngineStats
from llaisys.timeline import Timeline

Deliver: TypeAlias = Callable[[list[EngineOutput]], None]

# Calls (`messages.Call`) that may be open at the same time. Each may hold one piece of a session file.
CALLS_MAX = 16


class EngineConnection(Protocol):
    """A connection to one running engine."""

    def send(self, message: Submit | Cancel | Call) -> None:
        """Queue a message for the engine's next step. Never waits; may be called from any thread."""


class EngineClient(ABC):
    """Submits requests to an engine and receives its outputs once per step. Base class of both clients.

    Owns the set of open request ids. An id is in the set from `submit` until its last output. The thread that
    removes the id ends the request, so each request ends exactly once. That thread is the engine's, or the
    caller of a `submit` that finds the engine dead. `submit` and `cancel` may be called from any thread;
    `deliver` is called on a thread of the client.

    `_connection` is the running engine, or None while there is none. A message to a dead engine is lost, and
    its request has ended already. A process forked from the owner has no engine.
    """

    def __init__(self, limits: Limits, deliver: Deliver, watchdog: EngineWatchdog | None) -> None:
        """Initialize a client without an engine. `watchdog`: the watchdog of this process."""
        self._watchdog = watchdog
        self._set_limits(limits)
        self._deliver = deliver
        # The client of each open request.
        self._open: dict[RequestId, str] = {}
        # The cancelled choices of each open request; None stands for all of them.
        self._cancelled: dict[RequestId, set[int | None]] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._callers: dict[int, str] = {}
        self._call_ids = itertools.count()
        self._open_max = limits.max_num_seqs + limits.max_num_queued_reqs
        if (
            limits.n_clients > 1
        ):  # up to `max_num_seqs` requests may wait again, preempted for a client's share
            self._open_max += limits.max_num_seqs
        self._open_shares = Shares(self._open_max, limits.n_clients)
        self._connection: EngineConnection | None = None
        self._error: EngineDeadError | None = None
        self._is_lost = False
        self._num_ended_by_violation = 0
        self._owner = os.getpid()

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        return self._limits

    def _set_limits(self, limits: Limits) -> None:
        """Set the limits of an engine, and the stats that it has before its first step."""
        self._limits = limits
        self._stats = EngineStats(kv_cells=limits.n_cells, kv_cells_free=limits.n_cells)

    @property
    def error(self) -> EngineDeadError | None:
        """The reason why there is no engine (dead, restarting or shutting down); None while one runs."""
        return self._error

    @property
    def is_lost(self) -> bool:
        """True once the engine is dead and will not be restarted, or the client is closed."""
        return self._is_lost

    def check(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, pooling: Pooling | None = None
    ) -> None:
        """Raise RejectedError or ContextLengthError for a request that could never run."""
        token_limit(prompt_ids, params, self._limits, pooling=pooling)

    def submit(self, request: EngineRequest) -> None:
        """Submit a request; its outputs follow through `deliver`.

        Raises RejectedError or ContextLengthError (the request could never run), QueueFullError,
        EngineDeadError. If the queue turns out to be full only in the engine, the request's single output has
        the error instead.
        """
        connection = self._connection
        if connection is None or not self._is_owner():
            raise self._dead_error()
        self.check(request.prompt_token_ids, request.params, pooling=request.pooling)
        request_id = request.request_id
        if request_id in self._open:
            raise RejectedError(f"request id {request_id!r} is in use", param="request_id")
        if not self._may_open(request.client_id):
            raise self._new_queue_full_error()
        self._open[request_id] = request.client_id
        try:
            connection.send(Submit(request))
        except BaseException:
            self._remove_open(request_id)
            raise
        if self._connection is not connection and self._remove_open(request_id):
            raise self._dead_error()  # the engine died in between, and `_end_all` missed this request

    def cancel(self, request_id: RequestId, index: int | None = None) -> None:
        """Cancel a request, or one choice of it, within one step; its ABORT output follows.

        Ids of ended or unknown requests are ignored.
        """
        connection = self._connection
        if connection is None or not self._is_owner() or request_id not in self._open:
            return
        cancelled = self._cancelled.setdefault(request_id, set())
        if not {index, None} & cancelled:
            cancelled.add(index)
            connection.send(Cancel(request_id, index, time.monotonic()))
        if request_id not in self._open:  # the request ended in between
            self._cancelled.pop(request_id, None)

    def call_session(self, request: SessionRequest) -> Future[list[SessionInfo]]:
        """Send an operation on a client's sessions; its `call_id` is assigned here.

        The future gets the session (all sessions for `list`) or the error; it cannot be canceled. Raises
        EngineDeadError, or ExhaustedError if CALLS_MAX calls are open.
        """
        return self._call(
            request.client_id, lambda call_id: msgspec.structs.replace(request, call_id=call_id)
        )

    def timelines(self, request_id: RequestId, client_id: str = "") -> Future[dict[int, Timeline]]:
        """Request the timeline of each choice of a request; empty for an unknown request.

        Raises the errors of `call_session`.
        """
        return self._call(client_id, lambda call_id: TimelineRequest(call_id, request_id))

    def reset_prefix_cache(self) -> Future[bool]:
        """Remove the cached prefixes that no session pins; False, without effect, while requests run.

        Raises the errors of `call_session`.
        """
        return self._call("", ResetPrefixCache)

    def load_lora(self, lora: LoRARequest) -> Future[None]:
        """Load a LoRA adapter, whose `lora_int_id` no other adapter has. The future gets the error, if any.

        Raises the errors of `call_session`.
        """
        return self._call("", lambda call_id: LoadLora(call_id, lora))

    def unload_lora(self, lora_int_id: int) -> Future[None]:
        """Unload a LoRA adapter as soon as no open request uses it. The future does not wait for that.

        Raises the errors of `call_session`.
        """
        return self._call("", lambda call_id: UnloadLora(call_id, lora_int_id))

    def _call(self, client_id: str, message: Callable[[int], Call]) -> Future[Any]:
        connection = self._connection
        if connection is None or not self._is_owner():
            raise self._dead_error()
        self._callers = {id: client for id, client in self._callers.items() if id in self._calls}
        shares = Shares(CALLS_MAX, self._limits.n_clients)
        if not shares.allows(Counter(self._callers.values()), client_id):
            raise ExhaustedError(
                f"{shares.maximum} session, timeline and cache calls are open, which is the limit; try later"
            )
        call_id, future = next(self._call_ids), Future[Any]()
        future.set_running_or_notify_cancel()
        self._callers[call_id] = client_id
        self._calls[call_id] = future
        try:
            connection.send(message(call_id))
        except BaseException:
            self._calls.pop(call_id, None)
            raise
        if self._connection is not connection and self._calls.pop(call_id, None) is not None:
            raise self._dead_error()  # as in `submit`
        return future

    def stats(self) -> EngineStats:
        """Return the newest stats of the engine; see `EngineListener`."""
        return self._stats

    @property
    def num_violations(self) -> int:
        """Number of violated invariants in all engines of this client, including those that ended an
        engine."""
        return self._num_ended_by_violation + self._stats.num_violations

    def queue_full_error(self, client_id: str = "") -> QueueFullError | None:
        """Return the error that a request of this client would get now; None if it would be accepted.

        The error is returned if the client has reached its limit of open requests. With a single client, it
        is also returned if the queue was full after the newest step, which admitted every request that it
        could.
        """
        limits = self._limits
        is_queue_full = limits.n_clients < 2 and 0 < limits.max_num_queued_reqs <= self._stats.num_queued
        is_full = is_queue_full or not self._may_open(client_id)
        return self._new_queue_full_error() if is_full and self._connection is not None else None

    def _may_open(self, client_id: str) -> bool:
        """Return whether the client may open one more request."""
        if len(self._open) < self._open_shares.reserved:
            return True
        return self._open_shares.allows(Counter(list(self._open.values())), client_id)

    @property
    def is_stuck(self) -> bool:
        """True once the watchdog has found the engine stuck; this process should then end."""
        return self._watchdog is not None and self._watchdog.is_stuck

    def beat(self) -> None:
        """Report an iteration of the caller's event loop. After the first call the watchdog expects more."""
        if self._watchdog is not None:
            self._watchdog.beat()

    def close(self) -> None:
        """End every open request (EngineDeadError: shutting down), stop the engine and wait for it.

        Idempotent. Has no effect in a process forked from the owner.
        """
        atexit.unregister(self._close_at_exit)
        if self._is_owner():
            self._stop()

    # --- for the subclasses ---

    def _close_at_exit(self) -> None:
        """Close at interpreter exit, also after Ctrl-C. Takes at most one step.

        Otherwise a native thread would return into a finalized interpreter, which aborts the process.
        """
        while True:
            try:
                self.close()
                return
            except KeyboardInterrupt:
                continue

    @abstractmethod
    def _stop(self) -> None:
        """Stop the engine and wait until it has ended."""

    @property
    def _inbox_max(self) -> int:
        """Maximum number of messages that wait for a step.

        Enough for all open requests and calls, and for the same number that replace them in one step. A
        request sends one Submit, one Cancel for each of its choices (`check` bounds them) and one for all of
        them.
        """
        n_choices = min(CHOICES_MAX, self._limits.max_num_seqs)
        return 2 * ((n_choices + 2) * self._open_max + CALLS_MAX)

    def _receive_session_reply(self, reply: SessionReply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None:
            return
        if reply.error is None:
            future.set_result(reply.sessions)
        else:
            future.set_exception(reply.error)

    def _receive_reply(self, reply: Reply) -> None:
        future = self._calls.pop(reply.call_id, None)
        if future is None:
            return
        match reply:
            case TimelineReply(timelines=timelines):
                future.set_result(timelines)
            case PrefixCacheReset(is_reset=is_reset):
                future.set_result(is_reset)
            case LoraReply(error=None):
                future.set_result(None)
            case LoraReply(error=error):
                future.set_exception(error)

    def _receive_step(self, outputs: list[EngineOutput], stats: EngineStats | None) -> None:
        if stats is not None:
            self._stats = stats
        for output in outputs:
            if output.last:
                self._remove_open(output.request_id)
        if outputs:
            self._deliver(outputs)

    def _end_all(self, error: EngineDeadError, *, final: bool = False) -> None:
        """End every open request: the engine is dead. `final`: it will not be restarted."""
        if self._connection is not None and isinstance(error, InvariantError):
            self._num_ended_by_violation += 1
        self._error = error
        self._connection = None
        self._is_lost = final
        self._set_limits(self._limits)
        last = [
            rejected_output(request_id, _copy(error))
            for request_id in list(self._open)
            if self._remove_open(request_id)
        ]
        if last:
            self._deliver(last)
        for call_id in list(self._calls):
            future = self._calls.pop(call_id, None)
            if future is not None:
                future.set_exception(_copy(error))

    # --- inside ---

    def _new_queue_full_error(self) -> QueueFullError:
        limits, shares = self._limits, self._open_shares
        reason = f"{limits.max_num_seqs} requests may run and {limits.max_num_queued_reqs} may wait"
        if shares.n_clients > 1:
            reason = f"a client may have {shares.reserved} open requests, or {shares.maximum} if it is alone"
        return QueueFullError(f"too many open requests: {reason}", retry_after_s=self._stats.queue_s)

    def _is_owner(self) -> bool:
        return os.getpid() == self._owner

    def _dead_error(self) -> EngineDeadError:
        if not self._is_owner():
            return EngineDeadError("the engine belongs to the process that this one was forked from")
        return _copy(self._error or EngineDeadError("the engine has just been restarted; try again"))

    def _remove_open(self, request_id: RequestId) -> bool:
        """Remove the id of an open request; return True only to the caller that has removed it."""
        try:
            del self._open[request_id]
        except KeyError:
            return False
        self._cancelled.pop(request_id, None)
        return True


def _copy(error: EngineDeadError) -> EngineDeadError:
    """Return a copy of an error, because raising an error adds stack frames to it."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy


class InprocClient(EngineClient):
    """An engine on a thread of this process; `deliver` is called on that thread. It is never restarted."""

    def __init__(
        self,
        build: Callable[[], Engine],
        limits: Limits,
        deliver: Deliver,
        clock: Callable[[], float] = time.monotonic,
        watchdog: EngineWatchdog | None = None,
    ) -> None:
        """Build the engine on its own thread and wait for it. Raises the errors of `build`."""
        super().__init__(limits, deliver, watchdog)
        on_end = partial(self._end_all, final=True)
        listener = EngineListener(
            self._receive_step, self._receive_session_reply, self._receive_reply, on_end, clock
        )
        self._loop = EngineLoop(build, listener, self._inbox_max, watchdog)
        self._connection = self._loop
        # Register this first, so that a program interrupted during the load also waits for the thread.
        atexit.register(self._close_at_exit)
        try:
            self._set_limits(self._loop.start())
        except BaseException:
            atexit.unregister(self._close_at_exit)
            raise

    def _stop(self) -> None:
        self._loop.stop()
