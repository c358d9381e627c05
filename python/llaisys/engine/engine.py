"""LLMEngine: submit, step, cancel. Owns every open request; settles what a step gave. One thread."""

from __future__ import annotations

import time

from llaisys.engine.cells import Room, check_queue, near_need, stream_of
from llaisys.engine.chronicle import Chronicle
from llaisys.engine.executor import Executor
from llaisys.engine.fairness import FairState
from llaisys.engine.grammar import Grammars
from llaisys.engine.limits import Limits, check_first_token, token_limit
from llaisys.engine.outputs import EngineOutput, TokenLogprobs
from llaisys.engine.plan import Admit, Plan, View
from llaisys.engine.pooling import embedding_of, new_pool
from llaisys.engine.prefix import Lock, PrefixIndex
from llaisys.engine.reclaim import most_cells, reclaimable
from llaisys.engine.request import (
    Admitted,
    BrokenInvariant,
    Cancelled,
    Displaced,
    EngineRequest,
    Event,
    Expired,
    Failed,
    Finished,
    Request,
    Restored,
    RestoreFailed,
    Running,
    WaitingForRemoteKvs,
    advance,
    derive_seed,
)
from llaisys.engine.requests import OpenRequests
from llaisys.engine.retention import Retention
from llaisys.engine.scheduler import plan
from llaisys.engine.session_calls import Hooks, SessionCalls
from llaisys.engine.sessions import Session, Sessions
from llaisys.engine.structured_output import StructuredOutputManager
from llaisys.engine.tally import Tally
from llaisys.engine.timeline import N_NAMES_MAX
from llaisys.engine.worker import Batch, Chunk, StepResult, Worker, sequence_of
from llaisys.errors import (
    EngineDeadError,
    ExhaustedError,
    LlaisysError,
    RejectedError,
    RequestFailedError,
)
from llaisys.stats import EngineStats
from llaisys.story import Story
from llaisys.types import RequestId

# The books are checked when the engine falls idle, and every so many steps.
_STEPS_BETWEEN_CHECKS = 1024
# Two heads of the queue that cannot run although nothing does, within so many seconds, end the engine.
_STUCK_S = 60.0


class LLMEngine:
    """Invariants: only running choices hold a sequence id, cells and a pinned prefix; each choice of a taken
    request gets exactly one output with a finish reason; the last of these is the request's `last`."""

    def __init__(
        self, executor: Executor, limits: Limits, seed: int, grammars: Grammars | None = None
    ) -> None:
        self._executor = executor
        self._worker = executor.worker
        self._limits = limits
        self._seed = seed
        self._window = executor.worker.attention_window
        self._retention = (
            Retention(executor.worker, limits.n_streams) if limits.enable_prefix_caching else None
        )
        self._structured = StructuredOutputManager(grammars)
        self._requests = OpenRequests()
        self._open = self._requests.by_ordinal
        self.sessions = Sessions(self._retention, limits)
        self.session_calls = SessionCalls(
            self.sessions,
            self._retention,
            limits,
            Hooks(self._n_spare, self.begin_restore, self.end_restore),
        )
        self._pending: list[EngineOutput] = []
        self._fair = FairState()
        self._last_scan_s = self._last_cleanup_s = self._stuck_s = float("-inf")
        self._num_submitted = self._num_choices = 0
        self._tally = Tally(time.perf_counter)
        self._chronicle = Chronicle()
        self._now_s = float("-inf")

    @property
    def limits(self) -> Limits:
        """The bounds it keeps."""
        return self._limits

    def stories(self, request_id: RequestId, now_s: float) -> dict[int, Story]:
        """Where the time of a request's choices went, by index; what is not known any more is left out."""
        return self._chronicle.stories(request_id, now_s)

    @property
    def tally(self) -> Tally:
        """What it counts."""
        return self._tally

    @property
    def requests(self) -> OpenRequests:
        """Who is open, and where; only to be read."""
        return self._requests

    @property
    def worker(self) -> Worker:
        """The model it runs."""
        return self._worker

    @property
    def longest_step_s(self) -> float:
        """Seconds that a full step is thought to take."""
        return self._tally.speed.longest_s(self._limits.max_num_batched_tokens)

    # --- requests come and go ---

    def submit(self, source: EngineRequest) -> None:
        """Takes a request into the queue: one record for each of its `n` choices.

        Raises RejectedError, ContextLengthError (could never run) or QueueFullError; then it is not taken.
        """
        limit = token_limit(source.prompt_token_ids, source.params, self._limits, pooling=source.pooling)
        self._structured.check(source)
        check_first_token(source)
        if source.request_id in self._requests:
            raise RejectedError(f"request id {source.request_id!r} is in use", param="request_id")
        seed = source.params.seed
        seed = derive_seed(self._seed, self._num_submitted) if seed is None else seed % 2**64
        leader = Request(source, self._num_choices, seed, limit, window_cells=self._window_cells(source))
        leader.pool = new_pool(source)
        check_queue(leader, self._requests, self._limits, self._n_room, self._tally.queue_s)
        session = self.sessions.named_by(source)
        if session is not None and session.is_restoring:
            leader.state = WaitingForRemoteKvs(source.session_id)
        self._chronicle.arrive(leader, self._requests.waiting.last(N_NAMES_MAX) or self._requests.running)
        choices = [leader]
        for index in range(1, source.params.n):
            choices.append(Request(source, leader.ordinal + index, seed, limit, index, leader))
            self._chronicle.arrive(choices[-1], [leader])
        self._structured.begin(choices)
        self._requests.add(choices)
        self._num_submitted += 1
        self._num_choices += len(choices)

    def cancel(self, request_id: RequestId, index: int | None = None) -> bool:
        """Ends a request, or one choice of it, now; its ABORT outputs come with the next step. False: it is
        unknown, or has ended."""
        named = [each for each in self._requests.choices(request_id) if index in (None, each.index)]
        self._pending += [self._finish(choice, Cancelled()) for choice in named]
        return bool(named)

    # --- restores: a request of a session that is being restored waits for it, in nobody's way ---

    def begin_restore(self, session: Session) -> None:
        """From now on requests that name the session wait for `end_restore`."""
        session.is_restoring = True

    def end_restore(self, session: Session, error: LlaisysError | None = None) -> None:
        """The session's KV is there, and its requests join the queue; with an `error` they end with it, and
        the session is gone."""
        session.is_restoring = False
        if error is not None:
            self.sessions.delete(session)
        for request in [*self._requests.parked.values()]:
            key = (request.source.client_id, request.source.session_id)
            if key != session.key or not isinstance(request.state, WaitingForRemoteKvs):
                continue
            if error is None:
                request.state = advance(request.state, Restored())
                self._requests.join(request)
                continue
            for sibling in self._requests.choices(request.request_id)[:0:-1]:
                self._pending.append(self._finish(sibling, Failed(error)))
            self._pending.append(self._finish(request, RestoreFailed(error)))

    # --- steps ---

    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._requests.running or self._requests.waiting or self._pending)

    def wait_s(self) -> float | None:
        """Seconds after which a step is due if nothing else happens; None: never."""
        if self.has_work() or self.session_calls.is_ready:
            return 0.0
        waits = [self._limits.timeout_scan_s] if self._requests.parked else []
        if self._retention is not None and self._retention.would_evict(self._limits.n_cells_spared):
            waits.append(self._limits.kv_cleanup_interval_s)
        return min(waits, default=None)

    def step(self, now_s: float) -> list[EngineOutput]:
        """Plans, runs one batch, settles. Outputs are in the order in which things happened.

        Raises EngineDeadError or BrokenInvariant: the engine is over; its open requests have had no end yet.
        """
        outputs, self._pending = self._pending, []
        self._tally.begin(now_s)
        self._now_s = now_s
        made = self._plan(now_s)
        outputs += self._prepare(made, now_s)
        self._chronicle.plan(made, self._open, len(self._requests.running), now_s)
        batch = self._batch(made, outputs)
        if len(batch):
            self._tally.lap("plan")
            result = self._executor.run(batch, now_s)
            self._tally.lap("execute")
            self._settle(batch, result, outputs)
            self._tally.lap("settle")
        elif self.has_work() and not (outputs or made.expire or made.preempt or self._structured.is_waiting):
            outputs.append(self._fail_stuck(now_s))
        if not self._open:
            self._tally.pause()
        if not self._open or self._tally.num_steps % _STEPS_BETWEEN_CHECKS == 0:
            self.check()
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and totals after the newest step."""
        index, streams, n_free = self._prefix, range(self._limits.n_streams), sum(self._worker.n_cells_free)
        n_evictable = 0 if index is None else sum(map(index.n_evictable, streams))
        return EngineStats(
            num_running=len(self._requests.running),
            num_queued=self._requests.num_queued,
            queue_s=self._tally.queue_s(self._requests.waiting),
            num_waiting=len(self._requests.waiting) + len(self._requests.parked),
            num_submitted=self._num_submitted,
            seq_ids_free=self._worker.n_seq_free,
            kv_cells=self._limits.n_cells,
            kv_cells_used=self._limits.n_cells - n_free - n_evictable,
            kv_cells_retained=0 if index is None else sum(map(index.n_retained, streams)),
            kv_cells_free=n_free,
            kv_cells_session=self.sessions.n_pinned,
            num_sessions=len(self.sessions),
            waiting_by_reason=self._requests.waiting_by_reason(),
            **self._tally.figures(),
        )

    def check(self) -> None:
        """Checks the books, the core's included. Raises BrokenInvariant or EngineDeadError."""
        self._requests.check()
        running = self._requests.running
        if self._worker.n_seq_free != self._limits.max_num_seqs - len(running):
            raise BrokenInvariant(f"{self._worker.n_seq_free} sequence ids are free, {len(running)} run")
        n_own = sum(r.num_own for r in running)
        used, retained = self._worker.n_cells_used, 0
        if self._retention is not None:
            self._retention.index.check()
            retained = sum(map(self._retention.index.n_retained, range(self._limits.n_streams)))
        # Without the cache, siblings share cells that are counted for none of them.
        forks = self._retention is None and any(r.num_shared for r in running)
        if used < n_own + retained or (used > n_own + retained and not forks):
            raise BrokenInvariant(f"{used} cells are held, the requests own {n_own}, the cache {retained}")
        self.sessions.check()
        self._executor.check()

    def close(self) -> None:
        """Frees the core. Open requests and calls are the caller's to end."""
        self.session_calls.close()
        self._structured.close()
        self._executor.close()

    # --- inside: before the batch ---

    @property
    def _prefix(self) -> PrefixIndex | None:
        return None if self._retention is None else self._retention.index

    def _view(self) -> View:
        return View(
            waiting=self._requests.waiting,
            running=self._requests.running,
            limits=self._limits,
            n_free=self._worker.n_cells_free,
            parked=tuple(self._requests.parked.values()),
            prefix=self._prefix,
            fair=self._fair,
            speed=self._tally.speed,
            last_scan_s=self._last_scan_s,
            last_cleanup_s=self._last_cleanup_s,
        )

    def _plan(self, now_s: float) -> Plan:
        """The next step. Where somebody lacks cells, sessions lose their pins before anybody gives way."""
        made = plan(self._view(), now_s)
        while made.lacks_cells and self.sessions.unpin_oldest():
            made = plan(self._view(), now_s)
        return made

    def _n_spare(self, stream: int) -> int:
        """Cells of an arena that are free or can be evicted, and that no running request needs soon."""
        left = Room(self._worker.n_cells_free, self._prefix, ()).left[stream]
        return left - sum(near_need(r) for r in self._requests.running if stream_of(r) == stream)

    def _window_cells(self, source: EngineRequest) -> int | None:
        """Cells that a request owns at most at once, where it surely reclaims and nothing is copied."""
        if self._window is None or source.params.n > 1 or self._limits.n_streams > 1:
            return None
        return most_cells(self._window, self._limits.max_num_batched_tokens)

    def _n_room(self) -> int:
        """Cells that are free or can be had, those that sessions pin included."""
        return sum(Room(self._worker.n_cells_free, self._prefix, ()).left) + self.sessions.n_pinned

    def _prepare(self, made: Plan, now_s: float) -> list[EngineOutput]:
        """Carries out all of a plan but the batch; returns the ends that this made."""
        outputs = []
        self._fair = made.fair
        self._last_scan_s = now_s if made.scanned else self._last_scan_s
        self._last_cleanup_s = now_s if made.cleaned else self._last_cleanup_s
        for request in [self._open[ordinal] for ordinal in made.expire]:
            outputs.append(self._finish(request, Expired(now_s - request.source.arrival_s)))
        for ordinal in made.preempt:
            self._preempt(self._open[ordinal])
        pins = {}
        if self._retention is not None:
            for admit in made.admit:
                if admit.n_cached:
                    request = self._open[admit.ordinal]
                    pins[admit.ordinal] = self._retention.pin(request, admit.n_cached, admit.source)
            self._tally.num_evicted_cells += self._retention.make_room(made.n_free_wanted)
        for admit in made.admit:
            outputs += self._admit(admit, pins.get(admit.ordinal))
        return outputs

    def _admit(self, admit: Admit, pin: Lock | None) -> list[EngineOutput]:
        """Leases a sequence and gives it its computed prefix; whom the core refuses ends here, alone."""
        request = self._open[admit.ordinal]
        try:
            seq_id = self._worker.open_sequence(request, admit.stream)
        except LlaisysError as error:
            if pin is not None and self._retention is not None:
                self._retention.unpin(pin)
            if isinstance(error, EngineDeadError):
                raise
            if isinstance(error, ExhaustedError):
                raise BrokenInvariant("a sequence id that should be free is lost") from error
            return [self._finish(request, Failed(error))]
        request.state = advance(request.state, Admitted(seq_id, admit.stream))
        self._requests.start(request)
        self._structured.admit(request)
        if pin is not None and self._retention is not None:
            self._retention.attach(request, pin, admit.source)
        elif admit.fork is not None:
            self._fork(request, self._open[admit.fork], admit.n_cached)
        if request.num_cached is None:
            request.num_cached = request.num_computed
            request.queued_s = self._now_s - request.source.arrival_s
            self._tally.admitted(request.num_prompt, request.num_computed)
        return []

    def _fork(self, request: Request, leader: Request, n_tokens: int) -> None:
        """The prompt's cells are the leader's: linked in its arena, copied to another."""
        self._worker.fork(sequence_of(leader), sequence_of(request), n_tokens)
        request.num_computed = n_tokens
        if stream_of(leader) == stream_of(request):
            request.num_shared = n_tokens
            leader.num_shared = max(leader.num_shared, n_tokens)

    def _preempt(self, request: Request) -> None:
        """Takes a running request's place; what it computed stays in the prefix cache while it can."""
        self._release(request, trusted=True)
        request.state = advance(request.state, Displaced())
        request.num_preempted += 1
        self._tally.num_preempted += 1
        self._requests.put_back(request)

    def _batch(self, made: Plan, outputs: list[EngineOutput]) -> Batch:
        """Rows of those who are still there: an admission may have failed, or a grammar."""
        decode = [self._open[ordinal] for ordinal in made.decode]
        chunks = []
        for each in made.chunks:
            request = self._open.get(each.ordinal)
            if request is not None:
                tokens = request.token_ids[each.start : each.start + each.n_tokens]
                chunks.append(Chunk(request, each.start, tokens, each.samples))
        batch = Batch(decode, chunks)
        outputs += [self._finish(request, Failed(error)) for request, error in self._structured.fill(batch)]
        return batch

    def _fail_stuck(self, now_s: float) -> EngineOutput:
        """Nobody could go on, which cannot be. With sound books the head of the queue is given up, once."""
        self.check()
        n_running, waiting = len(self._requests.running), self._requests.waiting
        if n_running or now_s - self._stuck_s < _STUCK_S:
            raise BrokenInvariant(f"{n_running} requests run, {len(waiting)} wait, none gets on")
        self._stuck_s = now_s
        self._tally.num_violations += 1
        error = RequestFailedError("the engine found no room for this request although nothing else runs")
        return self._finish(next(iter(waiting)), Failed(error))

    # --- inside: after the batch ---

    def _settle(self, batch: Batch, result: StepResult, outputs: list[EngineOutput]) -> None:
        """What the batch gave becomes the requests'."""
        step, tally = self._tally.num_steps, self._tally
        tally.computed(sum(len(chunk.token_ids) for chunk in batch.chunks), len(batch.decode))
        ids, logprobs = result.token_ids, result.logprobs
        for item, rows in result.hidden.items():
            batch.request(item).add_hidden(rows)
        for item, request in enumerate(batch.decode):
            if item in result.errors:
                outputs.append(self._finish(request, Failed(result.errors[item])))
                continue
            request.num_computed += 1
            request.last_step = step
            entry = logprobs.get(item)
            if request.num_output == 0:  # the chunks before left one token of the prompt
                outputs.append(self._first_token(request, ids[item], entry))
                continue
            event = request.append(ids[item])
            output = _output(request, ids[item], entry)
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
        if self._window is not None:
            for item in range(len(batch)):
                self._reclaim(batch.request(item), self._window)

    def _reclaim(self, request: Request, window: int) -> None:
        """Gives back what no later row sees, once no sibling is left to fork from the request."""
        siblings = self._requests.choices(request.request_id) if request.source.params.n > 1 else (request,)
        end = reclaimable(request, window)
        if not end or not all(isinstance(sibling.state, Running) for sibling in siblings):
            return
        self._worker.reclaim(sequence_of(request), end)
        if self._retention is not None:
            self._retention.let_go(request)
        request.num_shared, request.num_reclaimed = 0, end

    def _first_token(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> EngineOutput:
        """The first token since the request was admitted: all before it is computed, for others to use."""
        if request.pool is not None:
            return self._finish(request, *embedding_of(request))
        if self._retention is not None:
            self._retention.publish(request)
        is_first = request.num_output == 0
        event, output = request.append(token_id), _output(request, token_id, logprobs)
        if is_first and request.index == 0:
            output.num_cached_tokens = request.num_cached or 0
            if request.wants_prompt_logprobs:
                output.new_prompt_logprobs = request.prompt_logprobs
        if is_first:
            output.queued_s = request.queued_s
            for follower in self._requests.followers(request):
                self._requests.join(follower)
        self._chronicle.begin_decoding(request)
        return output if event is None else self._finish(request, event, output)

    # --- inside: ways from state to state ---

    def _release(self, request: Request, *, trusted: bool) -> None:
        """Returns a running request's sequence, its cells and its pinned prefix."""
        if self._retention is not None:
            (self._retention.leave if trusted else self._retention.forget)(request)
        self._worker.close_sequence(sequence_of(request))
        request.num_computed = request.num_shared = request.num_reclaimed = 0

    def _finish(self, request: Request, event: Event, last: EngineOutput | None = None) -> EngineOutput:
        """The one way out: returns what the choice holds, forgets it, makes its only end."""
        if isinstance(request.state, Running):
            n_computed, stream = request.num_computed, request.state.stream
            trusted = not isinstance(event, Failed)
            self._release(request, trusted=trusted)
            if trusted:
                self.sessions.settle(request, n_computed, stream)
        request.state = state = advance(request.state, event)
        if not isinstance(state, Finished):
            raise BrokenInvariant(f"{event!r} does not end a request")
        is_last = self._requests.remove(request)
        self._structured.end(request)
        self._fair = self._fair.charge(request, request.num_output)
        self._tally.ended(state.reason)
        self._chronicle.end(request, self._now_s)
        output = last or EngineOutput(request.request_id, [], index=request.index)
        output.finish_reason, output.stop_reason, output.error = state.reason, state.stop_reason, state.error
        output.last = is_last
        return output


def _output(request: Request, token_id: int, logprobs: TokenLogprobs | None) -> EngineOutput:
    """One token of a choice."""
    entries = None if logprobs is None else [logprobs]
    return EngineOutput(request.request_id, [token_id], entries, index=request.index)
