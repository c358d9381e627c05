"""Scheduler: chooses the requests of the next step and their numbers of tokens. Pure: no clock, no I/O.

There is no prefill phase and no decode phase: each step computes missing tokens of requests within a token
budget. Decoding requests (one token missing) come first, so a long prompt never delays them. The rest of the
budget goes to prompts, in chunks. `request_queue` determines the order, `kv_cache_planner` the cells.

- The next waiting request in order is never overtaken, so no request starves.
- If a request lacks a cell, the scheduler preempts the last running request in order. The first request and
  worst-case-reserved requests are never preempted; if no other is left, the request skips the step.
- With several configured clients, a request of a client below its share is admitted at once. For that, the
  scheduler preempts the newest request above its client's share, one per step. Requests above a share are
  also the first to be preempted for cells.
- Progress guarantee: the first request in order can get every unreserved cell by preempting the others, and a
  worst-case-reserved request uses its reserved cells.
- If nothing runs and requests wait, the next in order is admitted. Every cell is then free or evictable, and
  `limits.token_limit` accepts only requests that fit one KV stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llaisys.engine.client_shares import ABOVE_IDS, ClientShares
from llaisys.engine.kv_cache_planner import KvCachePlanner, Placement
from llaisys.engine.limits import Limits
from llaisys.engine.prefill_budget import PrefillBudget
from llaisys.engine.prefix_cache import PrefixCache
from llaisys.engine.request import Request
from llaisys.engine.request_queue import DeficitRoundRobin, RoundRobinState, WaitingQueue, queue_key
from llaisys.engine.state_stops import next_stop, state_stops
from llaisys.engine.step_speed import StepSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """The state of the engine that the scheduler reads.

    - `running`: in `queue_key` order. `parked`: open requests that wait for something other than capacity.
    - `drafts`: the number of draft tokens proposed for running requests, by ordinal.
    - `n_free`: free cells by KV stream. `prefix_cache`: None if prefix caching is off.
    - `round_robin`, `speed`: state after the last step. `last_deadline_scan_s`, `last_cleanup_s`: times of
      the last checks of the deadlines and of the prefix cache's size.
    """

    now_s: float
    waiting: WaitingQueue
    running: Sequence[Request]
    limits: Limits
    n_free: tuple[int, ...]
    parked: Sequence[Request] = ()
    drafts: Mapping[int, int] = field(default_factory=dict)
    prefix_cache: PrefixCache | None = None
    round_robin: RoundRobinState = field(default_factory=RoundRobinState)
    speed: StepSpeed = field(default_factory=StepSpeed)
    last_deadline_scan_s: float = float("-inf")
    last_cleanup_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request gets a sequence in the KV stream `stream`, with its first `n_cached` tokens computed.

    They are linked or copied from the stream `source`: from the sibling `fork` (an ordinal), otherwise from
    the prefix cache. `state_stops`: where chunks of its prompt end so that recurrent states can be kept.
    """

    ordinal: int
    stream: int = 0
    n_cached: int = 0
    source: int = 0
    fork: int | None = None
    state_stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start <= i < start + n_tokens` of a request. `samples`: the last row samples the next token."""

    ordinal: int
    start: int
    n_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. The engine carries it out in this order:

    1. Pin the prefixes of `admit`, end the requests of `expire`, and preempt those of `preempt`.
    2. Evict until `n_free_wanted` cells are free in each KV stream.
    3. Start the requests of `admit`.
    4. Compute one token for each of `decode`, with its number of `drafts`, and `chunks`, in one batch.

    Ordinals identify requests. `without_cells`: running requests, or the next in the queue, that found no
    cells. `lacks_cells`: more cells would avoid a preemption or serve a request without cells. `round_robin`:
    for the next view. `scanned_deadlines`, `cleaned_cache`: the periodic checks of this step.

    Invariants: tokens sum to at most `max_num_batched_tokens`, requests to at most `max_batch_size`. Each
    request is in at most one of `expire`, `preempt` and (once) `decode` or `chunks`. An admitted request has
    a chunk.
    """

    expire: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    n_free_wanted: tuple[int, ...] = ()
    admit: tuple[Admission, ...] = ()
    decode: tuple[int, ...] = ()
    drafts: Mapping[int, int] = field(default_factory=dict)
    chunks: tuple[ScheduledChunk, ...] = ()
    without_cells: tuple[int, ...] = ()
    lacks_cells: bool = False
    round_robin: RoundRobinState = field(default_factory=RoundRobinState)
    scanned_deadlines: bool = False
    cleaned_cache: bool = False


class Scheduler:
    """Plans steps. It has no state: equal views give equal plans."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Return the plan of the next step; the view does not change."""
        step = _Step(view)
        step.expire()
        step.preempt_for_client_shares()
        step.schedule_running()
        step.schedule_prompts()
        step.schedule_drafts()
        return step.output()


class _Step:
    """One plan in the making; `Scheduler.schedule` calls its methods in order."""

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self._limits = limits = view.limits
        self._scans_deadlines = view.now_s - view.last_deadline_scan_s >= limits.timeout_scan_s
        self._cleans_cache = view.now_s - view.last_cleanup_s >= limits.kv_cleanup_interval_s
        forks = not limits.state_bytes
        self._cells = KvCachePlanner(view.n_free, view.prefix_cache, view.running, forks=forks)
        self._running = list(view.running)
        self._waiting = view.waiting
        self._round_robin = view.round_robin
        self._expired: list[Request] = []
        self._preempted_for_shares: list[Request] = []
        self._preempted_for_cells: list[Request] = []
        self._lacks_cells = False
        self._decoding: list[Request] = []
        self._drafts: dict[int, int] = {}
        self._prompts: list[Request] = []
        self._prefills: list[_Prefill] = []
        self._admitted: list[Admission] = []
        self._without_cells: list[Request] = []

    def output(self) -> SchedulerOutput:
        preempted = (*self._preempted_for_shares, *self._preempted_for_cells)
        # A clean-up evicts down to the eviction threshold, even if this step needs fewer cells.
        kept_free = self._limits.n_cells_kept_free if self._cleans_cache else 0
        return SchedulerOutput(
            expire=tuple(r.ordinal for r in self._expired),
            preempt=tuple(r.ordinal for r in preempted),
            n_free_wanted=tuple(max(kept_free, allocated) for allocated in self._cells.allocated),
            admit=tuple(self._admitted),
            decode=tuple([r.ordinal for r in self._decoding]),
            drafts=self._drafts,
            chunks=tuple(prefill.chunk() for prefill in self._prefills if prefill.n_tokens),
            without_cells=tuple(r.ordinal for r in self._without_cells),
            lacks_cells=bool(self._preempted_for_cells or self._without_cells or self._lacks_cells),
            round_robin=self._round_robin,
            scanned_deadlines=self._scans_deadlines,
            cleaned_cache=self._cleans_cache,
        )

    def expire(self) -> None:
        """Select the requests whose deadline has passed, and free the cells of running ones."""
        if not self._scans_deadlines:
            return
        now_s = self._view.now_s
        waiting = self._waiting.past_deadline(now_s)
        running = [r for r in self._running if r.source.deadline_s <= now_s]
        self._expired = [*waiting, *(r for r in self._view.parked if r.source.deadline_s <= now_s), *running]
        for request in running:
            self._cells.free(request)
            self._running.remove(request)
        if waiting:
            self._waiting = self._waiting.without(waiting)

    def preempt_for_client_shares(self) -> None:
        """If the next request's client is below its share, preempt requests for its sequence id and cells;
        none if that would not suffice."""
        running = self._running
        self._shares = shares = ClientShares(self._limits, running, self._waiting)
        if not (shares.is_contended and self._waiting):
            return
        head = next_to_admit(self._new_round_robin(), shares)
        if head is None or not shares.is_below(head):
            return
        candidates = shares.preemptible(head)
        n_needed = 0
        if len(running) >= self._limits.max_num_seqs:
            if not candidates or shares.level(candidates[0]) != ABOVE_IDS:
                return
            n_needed = 1
        if not self._fits_without(candidates[:n_needed], head):
            if not self._fits_without(candidates, head):
                return
            self._lacks_cells = True
            while not self._fits_without(candidates[:n_needed], head):
                n_needed += 1
        self._preempted_for_shares = preempted = candidates[:n_needed]
        self._running = [r for r in running if r not in preempted]
        for request in preempted:
            self._cells.free(request)
        shares.preempt(preempted)

    def schedule_running(self) -> None:
        """Give running requests a batch slot and a cell for the next token; preempt for missing cells."""
        chosen = select_batch(self._running, self._limits.n_batch_slots)
        if not self._cells.allocate_one_each(chosen):
            n_chosen, chosen = len(chosen), self._allocate_or_preempt(chosen)
            if not chosen and n_chosen < len(self._running):
                # Requests outside the batch hold all cells. Requests that can always continue get the slots.
                self._without_cells.clear()
                reserved_first = sorted(self._shares.order, key=lambda r: not r.worst_case_reserved)
                chosen = [r for r in self._running if r in reserved_first[:n_chosen]]
                chosen = self._allocate_or_preempt(chosen)
        self._decoding = [r for r in chosen if len(r.token_ids) - r.num_computed == 1]
        if len(self._decoding) < len(chosen):
            self._prompts = [r for r in chosen if r.num_missing > 1]

    def schedule_prompts(self) -> None:
        """Divide the budget of prompt tokens by priority among running and newly admitted prompts. A second
        pass gives the remaining tokens to prompts that the first pass limited."""
        candidates, n_prompts = None, len(self._prompts)
        n_ids = self._limits.max_num_seqs - len(self._running)
        if self._waiting and n_ids > 0 and not self._preempted_for_cells:
            candidates = _AdmissionCandidates(self._new_round_robin(), self._shares, self._cells, n_ids)
            self._free_batch_slot_for_admission(candidates)
            n_prompts = len(self._prompts) + len(self._waiting)
        elif not self._prompts:
            return
        n_clients = self._n_prefilling_clients() if self._shares.is_contended else 1
        budget = PrefillBudget(self._limits, self._view.speed, self._decoding, n_clients)
        for prefill in self._prompts_by_priority(candidates, budget):
            self._grant_tokens(prefill, budget, all_served=n_prompts == 1)
            self._prefills.append(prefill)
        for prefill in self._prefills:
            self._grant_tokens(prefill, budget, all_served=True)
        if candidates is not None:
            self._round_robin = candidates.round_robin.state()
            self._without_cells += candidates.without_cells

    def schedule_drafts(self) -> None:
        """Add draft tokens to decoding requests, in a step without prompt tokens and preemptions. They get
        only cells that are free now, so drafts evict nothing."""
        if not self._view.drafts or self._preempted_for_cells or any(p.n_tokens for p in self._prefills):
            return
        budget = PrefillBudget(self._limits, self._view.speed, self._decoding)
        for request in self._decoding:
            stream = request.stream
            n_free = self._view.n_free[stream] - self._cells.allocated[stream]
            n_cells = min(n_free, self._cells.available(request, stream))
            n_wanted = min(self._view.drafts.get(request.ordinal, 0), n_cells)
            if n_drafts := budget.grant(request, n_wanted, 0, all_served=True):
                self._cells.allocate(request, stream, n_drafts)
                self._drafts[request.ordinal] = n_drafts

    # --- client shares ---

    def _fits_without(self, preempted: Sequence[Request], head: Request) -> bool:
        """Return True if a waiting request finds cells after these running ones are preempted."""
        return self._cells.without(preempted).can_admit(head) is not None

    def _new_round_robin(self) -> DeficitRoundRobin:
        overdue_before_s = self._view.now_s - self._limits.max_queue_wait_s
        quantum = self._limits.max_num_batched_tokens
        return DeficitRoundRobin(self._waiting, self._view.round_robin, quantum, overdue_before_s)

    # --- running requests ---

    def _allocate_or_preempt(self, chosen: list[Request]) -> list[Request]:
        """Return the requests that got a cell, in order of the shares; preempt the last ones if needed."""
        served, wanted = [], set(chosen)
        for request in self._shares.order:
            if request not in wanted or request in self._preempted_for_cells:
                continue
            stream = request.stream
            while self._cells.available(request, stream) < 1:
                victim = self._victim(request, stream)
                if victim is None:
                    self._without_cells.append(request)
                    break
                self._cells.free(victim)
                self._preempted_for_cells.append(victim)
            else:
                self._cells.allocate(request, stream, 1)
                served.append(request)
        return sorted(served, key=queue_key)

    def _victim(self, request: Request, stream: int) -> Request | None:
        """Return the last preemptible request after `request` in its stream, never the first in order."""
        for other in reversed(self._shares.order[1:]):
            if other is request:
                return None
            is_preemptible = not other.worst_case_reserved and other not in self._preempted_for_cells
            if is_preemptible and other.stream == stream:
                return other
        return None

    # --- prompts ---

    def _n_prefilling_clients(self) -> int:
        """Return the number of clients with prompts to compute or waiting requests."""
        waiting = {client for _, client in self._waiting.client_queues}
        return len(waiting | {r.source.client_id for r in self._prompts})

    def _free_batch_slot_for_admission(self, candidates: _AdmissionCandidates) -> None:
        """If no slot is free and a request can be admitted, free that of the most recently served one."""
        chosen = [*self._decoding, *self._prompts]
        if len(chosen) < self._limits.n_batch_slots or candidates.peek() is None:
            return
        newest = max(reversed(chosen), key=lambda r: r.last_step)
        (self._prompts if newest.num_missing > 1 else self._decoding).remove(newest)
        self._cells.allocate(newest, newest.stream, -1)

    def _prompts_by_priority(
        self, candidates: _AdmissionCandidates | None, budget: PrefillBudget
    ) -> Iterator[_Prefill]:
        """Yield running prompts and newly admitted ones, by priority; running ones first at equal
        priority."""
        running = iter(self._prompts)
        mine = next(running, None)
        n_slots = self._limits.n_batch_slots - len(self._decoding) - len(self._prompts)
        while True:
            head = None if candidates is None or not n_slots else candidates.peek_within(budget)
            if mine is not None and (head is None or mine.source.priority <= head.source.priority):
                self._cells.allocate(mine, mine.stream, -1)  # return the cell of its batch slot
                yield _Prefill(mine, mine.num_computed, mine.stream, mine.state_stops)
                mine = next(running, None)
            elif head is not None and candidates is not None:
                n_slots -= 1
                yield self._admit(head, candidates.admit(head))
            else:
                return

    def _admit(self, request: Request, placement: Placement) -> _Prefill:
        stream, n_cached, source = placement.stream, placement.n_cached, placement.source
        fork = None if placement.fork is None else placement.fork.ordinal
        stops = state_stops(request, n_cached, placement.n_same) if self._limits.n_states_kept else ()
        self._admitted.append(Admission(request.ordinal, stream, n_cached, source, fork, stops))
        return _Prefill(request, n_cached, stream, stops)

    def _grant_tokens(self, prefill: _Prefill, budget: PrefillBudget, *, all_served: bool) -> None:
        """Add the missing tokens of a prompt, as far as cells and budget allow."""
        n_cells = self._cells.available(prefill.request, prefill.stream)
        n_wanted = min(prefill.n_until_stop, n_cells)
        n_tokens = budget.grant(prefill.request, n_wanted, prefill.n_tokens, all_served=all_served)
        self._cells.allocate(prefill.request, prefill.stream, n_tokens)
        prefill.n_tokens += n_tokens


@dataclass(slots=True)
class _Prefill:
    """The part of a prompt in this step: `n_tokens` tokens from `start` on, up to the next of `stops`."""

    request: Request
    start: int
    stream: int
    stops: tuple[int, ...] = ()
    n_tokens: int = 0

    @property
    def n_missing(self) -> int:
        return len(self.request.token_ids) - self.start - self.n_tokens

    @property
    def n_until_stop(self) -> int:
        """Missing tokens that this step may compute."""
        stop = next_stop(self.stops, self.start)
        return self.n_missing if stop is None else stop - self.start - self.n_tokens

    def chunk(self) -> ScheduledChunk:
        return ScheduledChunk(self.request.ordinal, self.start, self.n_tokens, self.n_missing == 0)


class _AdmissionCandidates:
    """The waiting requests in order of admission, while sequence ids and cells suffice for the next one."""

    def __init__(
        self, round_robin: DeficitRoundRobin, shares: ClientShares, cells: KvCachePlanner, n_ids: int
    ) -> None:
        self.round_robin = round_robin
        self._shares = shares
        self._cells = cells
        self._n_ids = n_ids
        self._head: Request | None = None
        self._placement: Placement | None = None
        # The head, if it lacks cells.
        self.without_cells: list[Request] = []

    def peek(self) -> Request | None:
        """Return the next request to admit; None if it cannot start, because it is never overtaken."""
        head = next_to_admit(self.round_robin, self._shares) if self._n_ids else None
        if head is not self._head:
            self._head, self._placement = head, None if head is None else self._cells.can_admit(head)
            self.without_cells = [] if head is None or self._placement is not None else [head]
        return None if self._placement is None else head

    def peek_within(self, budget: PrefillBudget) -> Request | None:
        """Return the next request of a client with tokens left in this step; skip the other clients."""
        while budget.left:
            head = self.peek()
            if head is None or budget.left_of_client(head) > 0:
                return head
            self.round_robin.skip_client(head)
        return None

    def admit(self, request: Request) -> Placement:
        """Admit the request that `peek` returned."""
        if self._placement is None:
            raise ValueError("the next request has no placement")
        self._n_ids -= 1
        self._cells.admit(request, self._placement)
        self._shares.admit(request)
        self.round_robin.pop(request, len(request.token_ids) - self._placement.n_cached)
        return self._placement


def next_to_admit(round_robin: DeficitRoundRobin, shares: ClientShares) -> Request | None:
    """Return the next request in order, or one of a client below its share; None if no request is left.

    Skips clients that may not run another worst-case-reserved request.
    """
    head = round_robin.peek_next()
    while head is not None and not shares.may_reserve(head):
        round_robin.skip_client(head)
        head = round_robin.peek_next()
    if head is None or not shares.is_contended or shares.is_below(head):
        return head
    priority = head.source.priority
    heads = [r for r in round_robin.heads() if r.source.priority <= priority and shares.may_reserve(r)]
    return shares.furthest_below(heads) or head


def select_batch(running: Sequence[Request], n_slots: int) -> list[Request]:
    """Return all running requests, or the `n_slots` least recently served ones, in queue order."""
    if len(running) <= n_slots:
        return list(running)
    chosen = sorted(running, key=lambda r: r.last_step)[:n_slots]
    by_ordinal = {r.ordinal for r in chosen}
    return [r for r in running if r.ordinal in by_ordinal]
