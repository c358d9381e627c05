"""Who runs in the next step, and with how many tokens. Pure: a view in, a plan out; no clock, no I/O.

There is no prefill phase and no decode phase: a request has computed some of its tokens, and a step lets it
catch up under a token budget. Requests that miss one token (decoding) come first, so that a long prompt never
holds up an answer that is being given; what is left of the budget goes to prompts, in chunks.

The rules are in `fairness` (order), `budget` (tokens and seats) and `cells` (room); this file puts them
together:

- The next in order is never overtaken in the queue, so nobody starves: it waits for capacity alone.
- Who lacks a cell has the last in queue order preempted. The first in queue order among the running, and who
  was preempted `PREEMPTIONS_MAX` times, are never preempted; where nobody can be, a request sits the step
  out.
- With several configured clients (`client_shares`), a request of a client that runs fewer than its share goes
  before those of clients that do not, and is admitted at once: the newest request above its client's share is
  preempted for it, one in a step. Requests above a share are also the first to be preempted for cells.
- Somebody always gets on: the first in queue order finds every cell that is not set aside once the others are
  preempted, and who has cells set aside uses them.
- Zero-running lemma: nothing running and something waiting means that the next in order is admitted, because
  every cell is free or can be evicted, and `limits.token_limit` let in only what fits one arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.engine.budget import PrefillBudget, sit
from llaisys.engine.cells import Admission, Place, Room, stream_of
from llaisys.engine.client_shares import ABOVE_IDS, ClientShares
from llaisys.engine.fairness import FairState, Turns, queue_key
from llaisys.engine.limits import Limits
from llaisys.engine.plan import Admit, Plan, PlannedChunk, View
from llaisys.engine.request import Request


def plan(view: View, now_s: float) -> Plan:
    """The next step. Equal views and times give equal plans; nothing is changed."""
    limits = view.limits
    scanned = now_s - view.last_scan_s >= limits.timeout_scan_s
    cleaned = now_s - view.last_cleanup_s >= limits.kv_cleanup_interval_s
    draft = _Draft(view)
    if scanned:
        draft.expire(now_s)
    draft.share(now_s)
    draft.seat()
    draft.give_tokens(now_s)
    return Plan(
        expire=tuple(r.ordinal for r in draft.expired),
        preempt=tuple(r.ordinal for r in (*draft.displaced, *draft.preempted)),
        n_free_wanted=draft.n_free_wanted(cleaned=cleaned),
        admit=tuple(draft.admitted),
        decode=tuple([r.ordinal for r in draft.decoding]),
        chunks=tuple(share.chunk() for share in draft.shares if share.n_tokens),
        short=tuple(r.ordinal for r in draft.short),
        lacks_cells=bool(draft.preempted or draft.short or draft.lacks_cells),
        fair=draft.fair,
        scanned=scanned,
        cleaned=cleaned,
    )


@dataclass(slots=True)
class _Share:
    """What one prompt gets of the step: `n_tokens` from `start` on."""

    request: Request
    start: int
    stream: int
    n_tokens: int = 0

    @property
    def n_missing(self) -> int:
        return len(self.request.token_ids) - self.start - self.n_tokens

    def chunk(self) -> PlannedChunk:
        return PlannedChunk(self.request.ordinal, self.start, self.n_tokens, self.n_missing == 0)


class _Door:
    """Lets waiting requests in, in their order, while there are ids and cells for the next one."""

    def __init__(self, turns: Turns, shares: ClientShares, admission: Admission, limits: Limits) -> None:
        self._turns = turns
        self._shares = shares
        self._admission = admission
        self._n_ids = limits.max_num_seqs - admission.n_running
        self._head: Request | None = None
        self._place: Place | None = None
        # The head, if there is no room for it.
        self.lacks_cells: list[Request] = []

    @property
    def fair(self) -> FairState:
        """Where the turns stand."""
        return self._turns.state()

    def head(self) -> Request | None:
        """Who goes in next; None if nobody can: the next in order is never overtaken."""
        head = next_in_order(self._turns, self._shares) if self._n_ids else None
        if head is not self._head:
            self._head, self._place = head, None if head is None else self._admission.place(head)
            self.lacks_cells = [] if head is None or self._place is not None else [head]
        return None if self._place is None else head

    def pass_over(self, request: Request) -> None:
        """The head's client has had its share of this step."""
        self._turns.leave(request)

    def admit(self, request: Request) -> Place:
        """The head goes in."""
        if self._place is None:
            raise ValueError("the head has no place")
        self._n_ids -= 1
        self._admission.take(request, self._place)
        self._shares.admit(request)
        self._turns.take(request, len(request.token_ids) - self._place.n_cached)
        return self._place


def next_in_order(turns: Turns, shares: ClientShares) -> Request | None:
    """Who goes in next: the head of the turns, or a request of a client that is below its share. Lines are
    left whose next request may not be worst-case reserved beside those that are. None if nobody is left."""
    head = turns.head()
    while head is not None and not shares.may_reserve(head):
        turns.leave(head)
        head = turns.head()
    if head is None or not shares.is_contended or shares.is_below(head):
        return head
    priority = head.source.priority
    firsts = [r for r in turns.firsts() if r.source.priority <= priority and shares.may_reserve(r)]
    return shares.furthest_below(firsts) or head


class _Draft:
    """A plan in the making: `expire`, `share`, `seat`, `give_tokens`."""

    def __init__(self, view: View) -> None:
        self._limits = view.limits
        self._view = view
        self._room = Room(view.n_free, view.prefix, view.running)
        self._running = list(view.running)
        self._waiting = view.waiting
        self.expired: list[Request] = []
        # Preempted for a client's share, and for cells.
        self.displaced: list[Request] = []
        self.preempted: list[Request] = []
        self.lacks_cells = False
        self.decoding: list[Request] = []
        self.prompts: list[Request] = []
        self.shares: list[_Share] = []
        self.admitted: list[Admit] = []
        self.short: list[Request] = []
        self.fair = view.fair

    def expire(self, now_s: float) -> None:
        """Picks those whose deadline has passed; what the running ones hold can be had at once."""
        waiting = self._waiting.due(now_s)
        running = [r for r in self._running if r.source.deadline_s <= now_s]
        self.expired = [*waiting, *(r for r in self._view.parked if r.source.deadline_s <= now_s), *running]
        for request in running:
            self._room.give_back(request)
        if running:
            self._running = [r for r in self._running if r.source.deadline_s > now_s]
        if waiting:
            self._waiting = self._waiting.without(waiting)

    # --- the shares of clients ---

    def share(self, now_s: float) -> None:
        """Makes way for the next in order if its client runs less than its share: preempts for a sequence id
        and for cells, or nothing if that would not be enough."""
        running = self._running
        self._shares = shares = ClientShares(self._limits, running, self._waiting)
        if not (shares.is_contended and self._waiting):
            return
        head = next_in_order(self._turns(now_s), shares)
        if head is None or not shares.is_below(head):
            return
        candidates = shares.preemptible(head)
        n_needed = 0
        if len(running) >= self._limits.max_num_seqs:
            if not candidates or shares.level(candidates[0]) != ABOVE_IDS:
                return
            n_needed = 1
        if not self._fits(head, candidates[:n_needed]):
            if not self._fits(head, candidates):
                return
            self.lacks_cells = True
            while not self._fits(head, candidates[:n_needed]):
                n_needed += 1
        self.displaced = candidates[:n_needed]
        for request in self.displaced:
            self._room.give_back(request)
        self._running = [r for r in running if r not in self.displaced]
        shares.preempt(self.displaced)

    def _fits(self, head: Request, preempted: Sequence[Request]) -> bool:
        """True if there are cells for a waiting request without these running ones."""
        left = [r for r in self._running if r not in preempted]
        admission = Admission(self._room.without(preempted), self._view.prefix, left)
        return admission.place(head) is not None

    def _turns(self, now_s: float) -> Turns:
        limits = self._limits
        overdue_before_s = now_s - limits.max_queue_wait_s
        return Turns(self._waiting, self._view.fair, limits.max_num_batched_tokens, overdue_before_s)

    # --- a seat, and a cell for the next token, for everybody who runs ---

    def seat(self) -> None:
        """Seats all, or the least recently served; preempts for the cells that they lack."""
        seated = sit(self._running, self._limits.n_seats)
        if not self._room.take_one_each(seated):
            n_seated, seated = len(seated), self._give_cells(seated)
            if not seated and n_seated < len(self._running):
                # All of them are behind cells of those who do not sit. Who can always get on sits first.
                self.short.clear()
                sure = sorted(self._shares.order, key=lambda r: not r.is_secured)[:n_seated]
                seated = self._give_cells([r for r in self._running if r in sure])
        self.decoding = [r for r in seated if len(r.token_ids) - r.num_computed == 1]
        if len(self.decoding) < len(seated):
            self.prompts = [r for r in seated if r.num_missing > 1]

    def _give_cells(self, seated: list[Request]) -> list[Request]:
        """Those who get a cell, in the order of the shares; the last ones give way until there is one."""
        served, chosen = [], set(seated)
        for request in self._shares.order:
            if request not in chosen or request in self.preempted:
                continue
            stream = stream_of(request)
            while self._room.available(request, stream) < 1:
                victim = self._victim(request, stream)
                if victim is None:
                    self.short.append(request)
                    break
                self._room.give_back(victim)
                self.preempted.append(victim)
            else:
                self._room.take(request, stream, 1)
                served.append(request)
        return sorted(served, key=queue_key)

    def _victim(self, request: Request, stream: int) -> Request | None:
        """The last in the order of the shares behind `request`, in its arena; never the first of all."""
        for other in reversed(self._shares.order[1:]):
            if other is request:
                return None
            if stream_of(other) == stream and not other.is_secured and other not in self.preempted:
                return other
        return None

    # --- tokens for prompts: of those who run, and of those who come ---

    def give_tokens(self, now_s: float) -> None:
        """Divides the step's prompt tokens in order; what is left goes to those who were cut short."""
        door = None
        if self._waiting and len(self._running) < self._limits.max_num_seqs and not self.preempted:
            admission = Admission(self._room, self._view.prefix, self._running)
            door = _Door(self._turns(now_s), self._shares, admission, self._limits)
            self._keep_a_seat(door)
        elif not self.prompts:
            return
        n_clients = self._n_prefilling() if self._shares.is_contended else 1
        budget = PrefillBudget(self._limits, self._view.speed, self.decoding, n_clients)
        n_seats = self._limits.n_seats - len(self.decoding) - len(self.prompts)
        alone = len(self.prompts) + (0 if door is None else len(self._waiting)) == 1
        prompts = iter(self.prompts)
        mine = next(prompts, None)
        while True:
            head = None if door is None or not n_seats else self._next(door, budget)
            if mine is not None and (head is None or mine.source.priority <= head.source.priority):
                share = _Share(mine, mine.num_computed, stream_of(mine))
                self._room.take(mine, share.stream, -1)  # the cell that came with its seat
                mine = next(prompts, None)
            elif head is not None and door is not None:
                share = self._admit(head, door)
                n_seats -= 1
            else:
                break
            self._give(share, budget, alone=alone)
            self.shares.append(share)
        for share in self.shares:
            self._give(share, budget, alone=True)
        if door is not None:
            self.fair = door.fair
            self.short += door.lacks_cells

    def _n_prefilling(self) -> int:
        """Clients that have prompts to compute, or requests that wait."""
        waiting = {client for _, client in self._waiting.lines}
        return len(waiting | {r.source.client_id for r in self.prompts})

    def _keep_a_seat(self, door: _Door) -> None:
        """Where all seats are taken and somebody can come in, the most recently served leaves its seat."""
        seated = [*self.decoding, *self.prompts]
        if len(seated) < self._limits.n_seats or door.head() is None:
            return
        newest = max(reversed(seated), key=lambda r: r.last_step)
        (self.prompts if newest.num_missing > 1 else self.decoding).remove(newest)
        self._room.take(newest, stream_of(newest), -1)

    def _next(self, door: _Door, budget: PrefillBudget) -> Request | None:
        """Who goes in next, with a token left to compute for it."""
        while budget.left:
            head = door.head()
            if head is None or budget.left_of_client(head) > 0:
                return head
            door.pass_over(head)
        return None

    def _admit(self, request: Request, door: _Door) -> _Share:
        place = door.admit(request)
        self._room.admit(request, place)
        fork = None if place.fork is None else place.fork.ordinal
        self.admitted.append(Admit(request.ordinal, place.stream, place.n_cached, place.source, fork))
        return _Share(request, place.n_cached, place.stream)

    def _give(self, share: _Share, budget: PrefillBudget, *, alone: bool) -> None:
        """As many tokens as are missing, and as there are cells and budget for."""
        room = self._room.available(share.request, share.stream)
        n_wanted = min(share.n_missing, room)
        n_tokens = budget.grant(share.request, n_wanted, share.n_tokens, alone=alone)
        self._room.take(share.request, share.stream, n_tokens)
        share.n_tokens += n_tokens

    def n_free_wanted(self, *, cleaned: bool) -> tuple[int, ...]:
        """Cells that must be free in each arena: what the step takes, and at a clean-up the rest above the
        threshold."""
        spare = self._limits.n_cells_spared if cleaned else 0
        return tuple(max(spare, taken) for taken in self._room.taken)
