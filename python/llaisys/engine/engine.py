"""LLMEngine: submit, step, cancel. It owns every open request and applies the result of each step.

Not thread-safe: the engine thread (`EngineLoop`) makes every call.
"""

from __future__ import annotations

import time

from llaisys.engine.batch import Batch, Chunk, StepResult
from llaisys.engine.disk_cache.disk_cache import DiskCache, DiskCacheCallbacks
from llaisys.engine.engine_output import EngineOutput, TokenLogprobs, token_output
from llaisys.engine.executor import Executor
from llaisys.engine.grammar import GrammarCompiler
from llaisys.engine.kv_blocks import KvEvents
from llaisys.engine.kv_cache_manager import KvCacheManager
from llaisys.engine.limits import Limits, check_first_token, token_limit
from llaisys.engine.lora import LoadedLora, LoraManager, with_salt
from llaisys.engine.pooling import new_pool, result_of
from llaisys.engine.prefix_cache import Pin
from llaisys.engine.queue_limits import check_queue
from llaisys.engine.remote_kvs import RemoteKvs
from llaisys.engine.request import (
    Admitted,
    BrokenInvariant,
    Cancelled,
    EngineRequest,
    Event,
    Expired,
    Failed,
    Finished,
    Preemption,
    Request,
    Running,
    WaitingForRemoteKvs,
    advance,
    derive_seed,
)
from llaisys.engine.request_queue import OpenRequests, RoundRobinState
from llaisys.engine.scheduler import Admission, Scheduler, SchedulerOutput, SchedulerView
from llaisys.engine.sessions.manager import SessionManager
from llaisys.engine.sessions.transfer import EngineCallbacks, SessionRequestHandler
from llaisys.engine.spec_decode.speculator import Speculator
from llaisys.engine.stats import EngineStatsRecorder
from llaisys.engine.structured_output import StructuredOutputManager
from llaisys.engine.timeline import NAMED_REQUESTS_MAX, TimelineRecorder
from llaisys.errors import EngineDeadError, ExhaustedError, LlaisysError, RejectedError, RequestFailedError
from llaisys.outputs import RequestId
from llaisys.stats import EngineStats
from llaisys.timeline import Timeline

# All counts are verified when the engine becomes idle, and every this many steps.
_STEPS_BETWEEN_CHECKS = 1024
# The engine ends if twice within this many seconds nothing runs and the next request cannot start.
_STUCK_S = 60.0


class LLMEngine:
    """Runs the requests of one model, step by step.

    Invariants: only running choices hold a sequence id, cells and a pinned prefix. Each choice of an accepted
    request gets exactly one output with a finish reason; the last of these outputs is marked `last`.

    `requests`: the open requests by state. Other modules only read these, `limits`, `worker`,
    `kv_events` and `disk_cache`. `loras` handles messages.
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        seed: int,
        grammar_compiler: GrammarCompiler | None = None,
        speculator: Speculator | None = None,
        kv_events: KvEvents | None = None,
    ) -> None:
        self._executor = executor
        self.worker = executor.worker
        self.limits = limits
        self._seed = seed
        self.kv_events = kv_events
        self._kv_cache = KvCacheManager(executor.worker, limits, kv_events)
        self._structured = StructuredOutputManager(grammar_compiler)
        self.loras = LoraManager(executor.worker, limits.max_loras)
        self._speculator = speculator
        self._proposals: dict[int, list[int]] = {}
        self._scheduler, self.requests = Scheduler(), OpenRequests()
        self._open = self.requests.by_ordinal
        self.sessions = SessionManager(self._kv_cache, limits)
        self.remote_kvs = waits = RemoteKvs(self.requests, self.sessions, self._end_waiting)
        hooks = EngineCallbacks(self._n_available_cells, waits.begin_restore, waits.end_restore, self.loras)
        self.session_requests = SessionRequestHandler(self.sessions, self._kv_cache, limits, hooks)
        self._pending: list[EngineOutput] = []
        self._round_robin = RoundRobinState()
        self._last_deadline_scan_s = self._last_cleanup_s = self._stuck_s = float("-inf")
        self._num_submitted = self._num_choices = 0
        self.stats_recorder = EngineStatsRecorder(time.perf_counter)
        self._timelines = TimelineRecorder()
        self.disk_cache: DiskCache | None = None
        if limits.prefix_cache_dir is not None:
            calls = DiskCacheCallbacks(self._n_available_cells, waits.end_load, time.perf_counter)
            self.disk_cache = DiskCache(self._kv_cache, limits, self.stats_recorder, calls)
        self._now_s = float("-inf")

    def timelines(self, request_id: RequestId, now_s: float) -> dict[int, Timeline]:
        """Return the timelines of a request's choices by index, without those no longer recorded."""
        return self._timelines.timelines(request_id, now_s)

    @property
    def longest_step_s(self) -> float:
        """Predicted seconds of a full step."""
        return self.stats_recorder.speed.longest_s(self.limits.max_num_batched_tokens)

    # --- submit and cancel ---

    def submit(self, source: EngineRequest) -> None:
        """Add a request to the queue, with one record for each of its `n` choices.

        Raises RejectedError, ContextLengthError (it could never run) or QueueFullError, without side effects.
        """
        lora = self.loras.acquire(source)
        try:
            self._submit(with_salt(source, lora), lora)
        except BaseException:
            self.loras.release(lora, source.params.n)
            raise

    def _submit(self, source: EngineRequest, lora: LoadedLora | None) -> None:
        limit = token_limit(source.prompt_token_ids, source.params, self.limits, pooling=source.pooling)
        self._structured.check_supported(source)
        check_first_token(source)
        if source.request_id in self.requests:
            raise RejectedError(f"request id {source.request_id!r} is in use", param="request_id")
        seed = source.params.seed
        seed = derive_seed(self._seed, self._num_submitted) if seed is None else seed % 2**64
        leader = Request(
            source, self._num_choices, seed, limit, window_cells=self._kv_cache.window_cells(source)
        )
        leader.pool, leader.lora = new_pool(source), lora
        check_queue(leader, self.requests, self.limits, self._n_cells, self.stats_recorder.queued_prefill_s)
        session = self.sessions.get_or_create(source)
        if session is not None and session.is_restoring:
            leader.state = WaitingForRemoteKvs(source.session_id)
        elif self.disk_cache is not None and self.disk_cache.begin_load(leader):
            leader.state = WaitingForRemoteKvs()
        ahead = self.requests.waiting.last(NAMED_REQUESTS_MAX) or self.requests.running
        self._timelines.record_arrival(leader, ahead)
        choices = [leader]
        for index in range(1, source.params.n):
            choices.append(Request(source, leader.ordinal + index, seed, limit, index, leader, lora=lora))
            self._timelines.record_arrival(choices[-1], [leader])
        self._structured.add(choices)
        self.requests.add(choices)
        self._num_submitted += 1
        self._num_choices += len(choices)

    def cancel(self, request_id: RequestId, index: int | None = None) -> bool:
        """End a request, or one choice of it, now; the next step returns its ABORT outputs.

        Return False if it is unknown or has ended.
        """
        named = [each for each in self.requests.choices(request_id) if index in (None, each.index)]
        self._pending += [self._finish(choice, Cancelled()) for choice in named]
        return bool(named)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes that no session pins. While requests run, do nothing and return False."""
        if self.requests.running:
            return False
        self._kv_cache.evict_all()
        return True

    # --- steps ---

    def has_work(self) -> bool:
        """Return True if a step would do something."""
        return bool(self.requests.running or self.requests.waiting or self._pending)

    def wait_s(self) -> float | None:
        """Return the seconds until a step is due without new messages; None: never."""
        if self.has_work() or self.session_requests.is_ready:
            return 0.0
        if self.disk_cache is not None and self.disk_cache.is_ready:
            return 0.0
        waits = [self.limits.timeout_scan_s] if self.requests.parked else []
        if self._kv_cache.would_evict(self.limits.n_cells_kept_free):
            waits.append(self.limits.kv_cleanup_interval_s)
        return min(waits, default=None)

    def step(self, now_s: float) -> list[EngineOutput]:
        """Plan, run one batch, and apply its result. Outputs are in the order of events.

        Raises EngineDeadError or BrokenInvariant if the engine cannot continue; the caller then ends the open
        requests.
        """
        outputs, self._pending = self._pending, []
        self.stats_recorder.begin_step(now_s)
        self._now_s = now_s
        plan = self._plan(now_s)
        outputs += self._prepare(plan, now_s)
        self._timelines.record_step(plan, self._open, len(self.requests.running), now_s)
        batch = self._batch(plan, outputs)
        if len(batch):
            self.stats_recorder.end_phase("plan")
            result = self._executor.execute_model(batch, now_s)
            self.stats_recorder.end_phase("execute")
            self._apply_result(batch, result, outputs)
            self.stats_recorder.end_phase("settle")
        elif self.has_work() and not (outputs or plan.expire or plan.preempt or self._structured.is_waiting):
            outputs.append(self._fail_stuck(now_s))
        if not self._open:
            self.stats_recorder.pause()
        if not self._open or self.stats_recorder.num_steps % _STEPS_BETWEEN_CHECKS == 0:
            self.check()
        return outputs

    def stats(self) -> EngineStats:
        """Return gauges and totals after the newest step."""
        return EngineStats(
            num_running=len(self.requests.running),
            num_queued=self.requests.num_queued,
            queue_s=self.stats_recorder.queued_prefill_s(self.requests.waiting),
            num_waiting=len(self.requests.waiting) + len(self.requests.parked),
            num_submitted=self._num_submitted,
            seq_ids_free=self.worker.n_seq_free,
            **self._kv_cache.totals(),
            kv_cells_session=self.sessions.n_pinned,
            num_sessions=len(self.sessions),
            waiting_by_reason=self.requests.waiting_by_reason(),
            **self.stats_recorder.totals(),
            **({} if self._speculator is None else self._speculator.totals()),
        )

    def check(self) -> None:
        """Verify all counts, the core's included. Raises BrokenInvariant or EngineDeadError."""
        self.requests.check()
        running = self.requests.running
        if self.worker.n_seq_free != self.limits.max_num_seqs - len(running):
            raise BrokenInvariant(f"{self.worker.n_seq_free} sequence ids are free, {len(running)} run")
        self.loras.check(sum(each.lora is not None for each in self._open.values()))
        self._kv_cache.check(running)
        self.sessions.check_invariants()
        self._executor.check()

    def close(self) -> None:
        """Free the core. The caller ends open requests and session calls."""
        self.session_requests.close()
        self._structured.close()
        for owned in (self._speculator, self.kv_events, self.disk_cache):
            if owned is not None:
                owned.close()
        self._executor.close()

    # --- inside: before the batch ---

    def _view(self, now_s: float) -> SchedulerView:
        return SchedulerView(
            now_s=now_s,
            waiting=self.requests.waiting,
            running=self.requests.running,
            limits=self.limits,
            n_free=self.worker.n_cells_free,
            parked=tuple(self.requests.parked.values()),
            drafts={ordinal: len(drafts) for ordinal, drafts in self._proposals.items()},
            prefix_cache=self._kv_cache.cache_to_plan,
            round_robin=self._round_robin,
            speed=self.stats_recorder.speed,
            last_deadline_scan_s=self._last_deadline_scan_s,
            last_cleanup_s=self._last_cleanup_s,
        )

    def _plan(self, now_s: float) -> SchedulerOutput:
        """Plan the next step. If cells are short, unpin sessions before preempting a request."""
        if self._speculator is not None:
            self._proposals = self._speculator.propose(
                self.requests.running, self.limits.n_batch_slots, self.stats_recorder.last_decode
            )
        plan = self._scheduler.schedule(self._view(now_s))
        while plan.lacks_cells and self.sessions.unpin_least_recent():
            plan = self._scheduler.schedule(self._view(now_s))
        return plan

    def _n_available_cells(self, stream: int) -> int:
        """Return how many cells of a KV stream a restored session may use."""
        return self._kv_cache.n_spare(stream, self.requests.running)

    def _n_cells(self) -> int:
        """Return how many cells are free or evictable once all sessions are unpinned."""
        return sum(self._kv_cache.n_allocatable()) + self.sessions.n_pinned

    def _prepare(self, plan: SchedulerOutput, now_s: float) -> list[EngineOutput]:
        """Carry out a plan except for its batch; return the outputs of requests that ended."""
        self._round_robin = plan.round_robin
        self._last_deadline_scan_s = now_s if plan.scanned_deadlines else self._last_deadline_scan_s
        self._last_cleanup_s = now_s if plan.cleaned_cache else self._last_cleanup_s
        # First, because the states after what ended requests computed may replace others.
        pins = {
            each.ordinal: self._kv_cache.pin_prefix(self._open[each.ordinal], each.n_cached, each.source)
            for each in plan.admit
            if each.n_cached and each.fork is None
        }
        expired = [self._open[ordinal] for ordinal in plan.expire]
        computed = [(r, r.num_computed, r.stream) for r in expired if isinstance(r.state, Running)]
        outputs = [self._finish(request, Expired(now_s - request.source.arrival_s)) for request in expired]
        for ordinal in plan.preempt:
            self._preempt(self._open[ordinal])
        if self._kv_cache.caches_prefixes:
            self.stats_recorder.num_evicted_cells += self._kv_cache.evict(plan.n_free_wanted)
        # Sessions pin only now what expired requests computed: the plan counts these cells as evictable.
        for request, n_computed, stream in computed:
            self.sessions.update_from_request(request, n_computed, stream)
        for admission in plan.admit:
            outputs += self._admit(admission, pins.get(admission.ordinal))
        return outputs

    def _admit(self, admission: Admission, pin: Pin | None) -> list[EngineOutput]:
        """Acquire a sequence and attach the computed prefix. A request that the core rejects ends here."""
        request = self._open[admission.ordinal]
        try:
            seq_id = self.worker.open_sequence(request, admission.stream)
        except LlaisysError as error:
            if pin is not None:
                self._kv_cache.unpin(pin)
            if isinstance(error, EngineDeadError):
                raise
            if isinstance(error, ExhaustedError):
                raise BrokenInvariant("a sequence id that should be free is lost") from error
            return [self._finish(request, Failed(error))]
        request.state = advance(request.state, Admitted(seq_id, admission.stream))
        request.state_stops = admission.state_stops
        self.requests.start(request)
        self._structured.start_compiling(request)
        if pin is not None:
            self._kv_cache.attach_prefix(request, pin, admission.source)
        elif admission.fork is not None:
            self._kv_cache.fork(request, self._open[admission.fork], admission.n_cached)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            request.queued_s = self._now_s - request.source.arrival_s
            self.stats_recorder.record_admission(request.num_prompt, request.num_computed)
        return []

    def _preempt(self, request: Request) -> None:
        """Stop a running request; its computed prefix stays cached until it is evicted."""
        self._kv_cache.free(request, is_valid=True)
        request.state = advance(request.state, Preemption())
        request.num_preempted += 1
        self.stats_recorder.num_preempted += 1
        self.requests.requeue(request)

    def _batch(self, plan: SchedulerOutput, outputs: list[EngineOutput]) -> Batch:
        """Return the batch of the plan, without requests whose admission or grammar has failed."""
        decode = [self._open[ordinal] for ordinal in plan.decode]
        chunks = []
        for chunk in plan.chunks:
            request = self._open.get(chunk.ordinal)
            if request is not None:
                tokens = request.token_ids[chunk.start : chunk.start + chunk.n_tokens]
                chunks.append(Chunk(request, chunk.start, tokens, chunk.samples))
        drafts = {ordinal: self._proposals[ordinal][:n] for ordinal, n in plan.drafts.items()}
        batch = Batch(decode, chunks, drafts)
        failed = self._structured.fill_masks(batch)
        outputs += [self._finish(request, Failed(error)) for request, error in failed]
        return batch

    def _fail_stuck(self, now_s: float) -> EngineOutput:
        """Handle a step in which no request could continue, which is a bug.

        If all counts are right, end the next waiting request, once; otherwise raise BrokenInvariant.
        """
        self.check()
        n_running, waiting = len(self.requests.running), self.requests.waiting
        if n_running or now_s - self._stuck_s < _STUCK_S:
            raise BrokenInvariant(f"{n_running} requests run, {len(waiting)} wait, and none can continue")
        self._stuck_s = now_s
        self.stats_recorder.num_violations += 1
        error = RequestFailedError("the engine found no KV cells for this request although nothing else runs")
        return self._finish(next(iter(waiting)), Failed(error))

    # --- inside: after the batch ---

    def _apply_result(self, batch: Batch, result: StepResult, outputs: list[EngineOutput]) -> None:
        """Apply the result of a batch to its requests."""
        step, stats = self.stats_recorder.num_steps, self.stats_recorder
        n_drafts = sum(map(len, batch.drafts.values()))
        stats.record_batch(sum(len(chunk.token_ids) for chunk in batch.chunks), len(batch.decode) + n_drafts)
        ids, logprobs = result.token_ids, result.logprobs
        for item, rows in result.hidden.items():
            batch.request(item).add_hidden(rows)
        for item, request in enumerate(batch.decode):
            if ids[item] < 0 and item in result.errors:
                outputs.append(self._finish(request, Failed(result.errors[item])))
                continue
            request.last_step = step
            if request.num_output == 0:  # earlier chunks left one token of the prompt
                request.num_computed += 1
                outputs.append(self._first_token(request, ids[item], logprobs.get(item)))
            elif item in result.accepted or request.ordinal in batch.drafts:
                self._apply_drafts(batch, result, item, outputs)
            else:
                request.num_computed += 1
                event, entry = request.append_token(ids[item]), logprobs.get(item)
                output = token_output(request, [ids[item]], [entry] if entry else None)
                outputs.append(output if event is None else self._finish(request, event, output))
        for item, chunk in enumerate(batch.chunks, len(batch.decode)):
            request = chunk.request
            if item in result.errors:
                outputs.append(self._finish(request, Failed(result.errors[item])))
                continue
            request.num_computed += len(chunk.token_ids)
            request.prompt_logprobs += result.prompt_logprobs.get(item, ())
            request.last_step = step
            if chunk.samples:
                outputs.append(self._first_token(request, ids[item], logprobs.get(item)))
            else:
                self._kv_cache.cache_chunk(request)
        if self._kv_cache.has_window:
            for item in range(len(batch)):
                self._reclaim(batch.request(item))

    def _apply_drafts(self, batch: Batch, result: StepResult, item: int, outputs: list[EngineOutput]) -> None:
        """Append the tokens of a request that had drafts, up to the one that ends it."""
        request = batch.request(item)
        token_ids, entries = result.tokens(item), result.token_logprobs(item)
        n_kept, error = self._structured.advance(request, token_ids)
        error = error or result.errors.get(item)
        event: Event | None = None
        for n_appended, token_id in enumerate(token_ids[:n_kept], start=1):
            request.num_computed += 1
            event = request.append_token(token_id)
            if event is not None:
                n_kept = n_appended
                break
        n_drafts = len(batch.drafts_of(request))
        if self._speculator is not None:
            self._speculator.record_accepted(request, n_drafts, n_kept - 1)
        self._timelines.record_drafts(request, n_drafts, n_kept - 1)
        output = token_output(request, token_ids[:n_kept], entries and entries[:n_kept])
        output.num_accepted_prediction_tokens = request.num_accepted_prediction_tokens
        output.num_rejected_prediction_tokens = request.num_rejected_prediction_tokens
        outputs.append(output if event is None else self._finish(request, event, output))
        if event is None and error is not None:
            outputs.append(self._finish(request, Failed(error)))

    def _reclaim(self, request: Request) -> None:
        """Free the cells that no later row sees, unless a waiting sibling may still fork from the request."""
        siblings = self.requests.choices(request.request_id) if request.source.params.n > 1 else (request,)
        if all(isinstance(sibling.state, Running) for sibling in siblings):
            self._kv_cache.reclaim(request)

    def _first_token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> EngineOutput:
        """Append the first token since the admission, and cache the computed prompt for other requests."""
        if request.source.pooling is not None:
            return self._finish(request, *result_of(request, logprobs))
        self._kv_cache.cache_computed(request)
        is_first = request.num_output == 0
        event = request.append_token(token_id)
        output = token_output(request, [token_id], [logprobs] if logprobs else None)
        if is_first and request.index == 0:
            output.num_cached_tokens = request.num_cached or 0
            if request.wants_prompt_logprobs:
                output.new_prompt_logprobs = request.prompt_logprobs
        if is_first:
            output.queued_s = request.queued_s
            for follower in self.requests.followers(request):
                self.requests.unpark(follower)
        self._timelines.record_first_token(request)
        return output if event is None else self._finish(request, event, output)

    def _end_waiting(self, request: Request, event: Event) -> None:
        """End a choice between steps; the next step returns its output."""
        self._pending.append(self._finish(request, event))

    def _finish(self, request: Request, event: Event, last: EngineOutput | None = None) -> EngineOutput:
        """End a choice: release its resources, remove it, and return its only output with a finish reason.

        The session of an expired request is updated in `_prepare`, after the eviction.
        """
        if isinstance(request.state, Running):
            n_computed, stream = request.num_computed, request.state.stream
            is_valid = not isinstance(event, Failed)
            self._kv_cache.free(request, is_valid=is_valid)
            if is_valid and not isinstance(event, Expired):
                self.sessions.update_from_request(request, n_computed, stream)
        request.state = state = advance(request.state, event)
        if not isinstance(state, Finished):
            raise BrokenInvariant(f"{event!r} does not end a request")
        is_last = self.requests.remove(request)
        self.loras.release(request.lora)
        self._structured.drop_matcher(request)
        if self._speculator is not None:
            self._speculator.finish(request)
        self._round_robin = self._round_robin.charge(request, request.num_output)
        self.stats_recorder.record_finish(state.reason)
        self._timelines.record_end(request, self._now_s)
        output = last or EngineOutput(request.request_id, [], index=request.index)
        output.finish_reason, output.stop_reason, output.error = state.reason, state.stop_reason, state.error
        output.last = is_last
        return output
