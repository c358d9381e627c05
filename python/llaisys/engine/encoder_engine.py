"""EncoderEngine: submit, step, cancel for an encoder. A request takes one step, and nothing outlives a step.

Not thread-safe: the engine thread (`EngineLoop`) makes every call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from llaisys.engine.encoder_worker import Encoded, EncoderWorker
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.messages import LoadLora, LoraReply, UnloadLora
from llaisys.engine.pooling import new_pool, sigmoid
from llaisys.engine.queue_limits import check_queue
from llaisys.engine.request import (
    Admitted,
    BrokenInvariant,
    Cancelled,
    Completed,
    EngineRequest,
    Event,
    Expired,
    Failed,
    Finished,
    Request,
    advance,
)
from llaisys.engine.request_queue import DeficitRoundRobin, OpenRequests, RoundRobinState
from llaisys.engine.scheduler import ScheduledChunk, SchedulerOutput
from llaisys.engine.sessions.manager import SessionReply, SessionRequest
from llaisys.engine.stats import EngineStatsRecorder
from llaisys.engine.timeline import NAMED_REQUESTS_MAX, TimelineRecorder
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError, RequestFailedError, UnsupportedError
from llaisys.outputs import FinishReason, RequestId
from llaisys.stats import EngineStats
from llaisys.timeline import Timeline


class EncoderEngine:
    """Runs the requests of one encoder, step by step; the methods are those of `LLMEngine`.

    Invariants: between steps every open request waits. Each accepted request gets exactly one output, marked
    `last`. The tokens of a step are at most `max_num_batched_tokens`, which fits any single request.

    A step computes the next requests by priority, fairness and arrival that fit. Their rows follow each other
    without padding, so a batch of different lengths costs no more than one of equal lengths.
    """

    kv_events = disk_cache = None  # there are no cells

    def __init__(self, worker: EncoderWorker, limits: Limits) -> None:
        self.worker = worker
        self.limits = limits
        self.requests = OpenRequests()
        self.session_requests, self.loras = RefusedSessions(), RefusedLoras()
        self._pending: list[EngineOutput] = []
        self._round_robin = RoundRobinState()
        self._last_deadline_scan_s = float("-inf")
        self._num_submitted = 0
        self.stats_recorder = EngineStatsRecorder(time.perf_counter)
        self._timelines = TimelineRecorder()
        self._now_s = float("-inf")

    def timelines(self, request_id: RequestId, now_s: float) -> dict[int, Timeline]:
        """Return the timeline of a request as that of choice 0; empty if it is no longer recorded."""
        return self._timelines.timelines(request_id, now_s)

    @property
    def longest_step_s(self) -> float:
        """Predicted seconds of a full step."""
        return self.stats_recorder.speed.longest_s(self.limits.max_num_batched_tokens)

    def submit(self, source: EngineRequest) -> None:
        """Add a request to the queue.

        Raises RejectedError, ContextLengthError (it could never run), UnsupportedError (it asks for a
        completion) or QueueFullError, without side effects.
        """
        if source.pooling is None:
            raise UnsupportedError("an encoder generates no text; use it for embeddings or scores")
        limit = token_limit(source.prompt_token_ids, source.params, self.limits, pooling=source.pooling)
        if source.request_id in self.requests:
            raise RejectedError(f"request id {source.request_id!r} is in use", param="request_id")
        request = Request(source, self._num_submitted, 0, limit, window_cells=0)
        request.pool = new_pool(source)
        check_queue(request, self.requests, self.limits, self._n_cells, self.stats_recorder.queued_prefill_s)
        self._timelines.record_arrival(request, self.requests.waiting.last(NAMED_REQUESTS_MAX))
        self.requests.add([request])
        self._num_submitted += 1

    def cancel(self, request_id: RequestId, index: int | None = None) -> bool:
        """End a request now; the next step returns its ABORT output. Return False if it is unknown."""
        named = [each for each in self.requests.choices(request_id) if index in (None, each.index)]
        self._pending += [self._finish(each, Cancelled()) for each in named]
        return bool(named)

    def reset_prefix_cache(self) -> bool:
        """Return True: an encoder caches nothing."""
        return True

    def has_work(self) -> bool:
        """Return True if a step would do something."""
        return bool(self.requests.waiting or self._pending)

    def wait_s(self) -> float | None:
        """Return 0 if a step is due without new messages; None: never."""
        return 0.0 if self.has_work() else None

    def step(self, now_s: float) -> list[EngineOutput]:
        """Expire requests, run one batch, and end its requests. Raises EngineDeadError or BrokenInvariant."""
        outputs, self._pending = self._pending, []
        self.stats_recorder.begin_step(now_s)
        self._now_s = now_s
        if now_s - self._last_deadline_scan_s >= self.limits.timeout_scan_s:
            self._last_deadline_scan_s = now_s
            for request in self.requests.waiting.past_deadline(now_s):
                outputs.append(self._finish(request, Expired(now_s - request.source.arrival_s)))
        batch = self._schedule(now_s)
        if batch:
            self._record_plan(batch, now_s)
            self.stats_recorder.end_phase("plan")
            results = self._execute(batch)
            self.stats_recorder.end_phase("execute")
            self.stats_recorder.record_batch(sum(len(each.token_ids) for each in batch), 0)
            for request, result in zip(batch, results, strict=True):
                outputs.append(self._apply(request, result))
            self.stats_recorder.end_phase("settle")
        if not self.requests.by_ordinal:
            self.stats_recorder.pause()
            self.check()
        return outputs

    def stats(self) -> EngineStats:
        """Return gauges and totals after the newest step. An encoder has no KV cells."""
        return EngineStats(
            num_running=0,
            num_queued=self.requests.num_queued,
            queue_s=self.stats_recorder.queued_prefill_s(self.requests.waiting),
            num_waiting=len(self.requests.waiting),
            num_submitted=self._num_submitted,
            seq_ids_free=self.limits.max_num_seqs,
            waiting_by_reason=self.requests.waiting_by_reason(),
            **self.stats_recorder.totals(),
        )

    def check(self) -> None:
        """Verify all counts. Raises BrokenInvariant."""
        self.requests.check()
        if self.requests.running:
            raise BrokenInvariant(f"{len(self.requests.running)} requests run between steps")

    def close(self) -> None:
        """Free the core. The caller ends open requests."""
        self.worker.close()

    # --- inside ---

    def _n_cells(self) -> int:
        """Return the tokens of the next step, which `check_queue` counts as free cells."""
        return self.limits.max_num_batched_tokens

    def _schedule(self, now_s: float) -> list[Request]:
        """Start and return the next requests of the queue, up to the first that does not fit in the step."""
        limits = self.limits
        queue = DeficitRoundRobin(
            self.requests.waiting,
            self._round_robin,
            limits.max_num_batched_tokens,
            now_s - limits.max_queue_wait_s,
        )
        batch: list[Request] = []
        n_left = limits.max_num_batched_tokens
        while len(batch) < limits.n_batch_slots and (request := queue.peek_next()) is not None:
            n_tokens = len(request.token_ids)
            if n_tokens > n_left:
                break
            queue.pop(request, n_tokens)
            n_left -= n_tokens
            batch.append(request)
        self._round_robin = queue.state()
        for request in batch:
            request.state = advance(request.state, Admitted(seq_id=0))
            self.requests.start(request)
            request.num_cached, request.queued_s = 0, now_s - request.source.arrival_s
            self.stats_recorder.record_admission(request.num_prompt, 0)
        return batch

    def _record_plan(self, batch: Sequence[Request], now_s: float) -> None:
        chunks = tuple(
            ScheduledChunk(ordinal=each.ordinal, start=0, n_tokens=len(each.token_ids), samples=True)
            for each in batch
        )
        self._timelines.record_step(
            SchedulerOutput(chunks=chunks), self.requests.by_ordinal, len(batch), now_s
        )

    def _execute(self, batch: Sequence[Request]) -> list[Encoded | LlaisysError]:
        """Run a batch. If the core rejects it, divide it until the faulty request is found."""
        try:
            return [*self.worker.encode(batch)]
        except EngineDeadError:
            raise
        except LlaisysError as error:
            if len(batch) == 1:
                return [error]
        half = len(batch) // 2
        return self._execute(batch[:half]) + self._execute(batch[half:])

    def _apply(self, request: Request, result: Encoded | LlaisysError) -> EngineOutput:
        """End a request with what the model computed for it."""
        if isinstance(result, LlaisysError):
            return self._finish(request, Failed(result))
        request.num_computed = len(request.token_ids)
        output = EngineOutput(request.request_id, [], num_cached_tokens=0, queued_s=request.queued_s)
        if request.pool is not None:
            rows = request.pool.rows(0, len(request.token_ids))
            request.pool.add(result.hidden[rows.start : rows.stop])
            output.embedding = request.pool.vector()
        elif result.logit is not None and math.isfinite(result.logit):
            output.score = sigmoid(result.logit) if request.source.normalize else result.logit
        if output.embedding is None and output.score is None:
            error = RequestFailedError("the model computed a number that is not finite for this request")
            return self._finish(request, Failed(error), output)
        return self._finish(request, Completed(FinishReason.STOP), output)

    def _finish(self, request: Request, event: Event, last: EngineOutput | None = None) -> EngineOutput:
        """End a request: remove it, and return its only output."""
        request.state = state = advance(request.state, event)
        if not isinstance(state, Finished):
            raise BrokenInvariant(f"{event!r} does not end a request")
        self.requests.remove(request)
        self.stats_recorder.record_finish(state.reason)
        self._timelines.record_end(request, self._now_s)
        output = last or EngineOutput(request.request_id, [])
        output.finish_reason, output.error, output.last = state.reason, state.error, True
        return output


class RefusedSessions:
    """Replies to every session request that an encoder has no sessions; the methods are those of
    `SessionRequestHandler`."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._replies: list[SessionReply] = []

    def handle(self, request: SessionRequest) -> None:
        """Refuse a request."""
        error = UnsupportedError("an encoder has no sessions, because it keeps no KV", param="session_id")
        self._replies.append(SessionReply(request.call_id, [], error))

    def continue_transfer(self) -> None:
        """Do nothing: there are no transfers."""

    def pop_replies(self) -> list[SessionReply]:
        """Return the replies since the last call."""
        replies, self._replies = self._replies, []
        return replies


class RefusedLoras:
    """Refuses LoRA adapters; the method is that of `LoraManager`."""

    def handle(self, message: LoadLora | UnloadLora) -> LoraReply:
        """Refuse a call."""
        error = UnsupportedError("an encoder has no LoRA adapters", param="lora_name")
        return LoraReply(message.call_id, error)
