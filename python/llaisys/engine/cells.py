"""Which requests have room in the KV cells, and who gives way where there is none. Pure.

A cell is free, or it can be had: the prefix cache lets go of what no running request uses. A request is
admitted when the cells that it needs soon are there beside those that the running ones need soon; if all go
on for long, somebody has to give way later. A *secured* request has been preempted often enough: it runs with
its worst case set aside, which nobody else may take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from llaisys.engine.fairness import WaitingQueue
from llaisys.engine.limits import Limits
from llaisys.engine.prefix import Lock, PrefixIndex
from llaisys.engine.request import BrokenInvariant, Request, Running
from llaisys.engine.requests import OpenRequests
from llaisys.errors import QueueFullError
from llaisys.shares import Shares

# Tokens of an answer for which a request needs room to be admitted: so many steps without a preemption.
HEADROOM_TOKENS = 8


def near_need(request: Request, n_cached: int = 0) -> int:
    """Cells, beyond those of its computed tokens, that a request takes soon; the worst case if secured.

    `n_cached`: tokens that it will find computed when it is admitted.
    """
    n_there = request.num_computed + n_cached
    if request.is_secured:
        return request.token_limit - n_there
    need = min(request.token_limit, len(request.token_ids) + HEADROOM_TOKENS) - n_there
    return need if request.window_cells is None else min(need, request.window_cells - request.num_own)


def stream_of(request: Request) -> int:
    """The arena of a running request."""
    if not isinstance(request.state, Running):
        raise BrokenInvariant(f"a request that is {request.state!r} has no arena")
    return request.state.stream


@dataclass(frozen=True, slots=True)
class Place:
    """Where an admitted request starts: with its first `n_cached` tokens computed, in the arena `stream`.

    They lie in the arena `source`: as the cells of the sibling `fork`, else as the prefix cache's; `n_pinned`
    of the latter could have been evicted until now.
    """

    stream: int
    n_cached: int = 0
    source: int = 0
    n_pinned: int = 0
    fork: Request | None = None


class Room:
    """The cells of one plan, by arena: what can be had, less what the plan has given out.

    - `left`: cells that are free or can be evicted. `taken`: cells that must be free when the batch runs.
    - `leaving`: pins of requests that the plan ends or preempts.
    - Invariant: `left` covers what is set aside for secured requests, if it did so at first.
    """

    def __init__(self, n_free: Sequence[int], prefix: PrefixIndex | None, running: Sequence[Request]) -> None:
        self._prefix = prefix
        self.left = [n + (0 if prefix is None else prefix.n_evictable(s)) for s, n in enumerate(n_free)]
        self.taken = [0] * len(n_free)
        self.leaving: list[Lock] = []
        self._aside = [0] * len(n_free)
        for request in running:
            if request.is_secured:
                self._aside[stream_of(request)] += near_need(request)

    def take_one_each(self, requests: Sequence[Request]) -> bool:
        """Each of these running requests takes a cell, if there is plenty; False, and none does, if not."""
        n = len(requests)
        if any(n > left - aside for left, aside in zip(self.left, self._aside, strict=True)):
            return False
        if len(self.left) == 1 and not self._aside[0]:
            self.left[0] -= n
            self.taken[0] += n
        else:
            for request in requests:
                self.take(request, stream_of(request), 1)
        return True

    def available(self, request: Request, stream: int) -> int:
        """Cells that a request may take now."""
        return self.left[stream] - (0 if request.is_secured else self._aside[stream])

    def take(self, request: Request, stream: int, n_cells: int) -> None:
        """A request takes cells, at most those available to it."""
        self.left[stream] -= n_cells
        self.taken[stream] += n_cells
        if request.is_secured:
            self._aside[stream] -= n_cells

    def give_back(self, request: Request) -> None:
        """A running request leaves: its own cells are free, and those that only its lock pins can be had.

        A lower bound: cells that it shares with another that leaves too are not counted.
        """
        stream = stream_of(request)
        private = 0 if request.lock is None or self._prefix is None else self._prefix.n_private(request.lock)
        self.left[stream] += request.num_own + private
        if request.lock is not None:
            self.leaving.append(request.lock)
        if request.is_secured:
            self._aside[stream] -= near_need(request)

    def without(self, requests: Sequence[Request]) -> Room:
        """A copy in which these running requests have left; this one stays as it is."""
        room = copy(self)
        room.left, room.taken, room._aside = [*self.left], [*self.taken], [*self._aside]
        room.leaving = [*self.leaving]
        for request in requests:
            room.give_back(request)
        return room

    def admit(self, request: Request, place: Place) -> None:
        """A waiting request goes to its place: what it reuses is pinned, and copied if it lies elsewhere."""
        self.left[place.source] -= place.n_pinned
        if request.is_secured:
            self._aside[place.stream] += near_need(request, place.n_cached)
        if place.stream != place.source:
            self.left[place.stream] -= place.n_cached
            self.taken[place.stream] += place.n_cached


class Admission:
    """Where the next request of the queue can run, beside those that run and those admitted before it."""

    def __init__(self, room: Room, prefix: PrefixIndex | None, running: Sequence[Request]) -> None:
        self._prefix = prefix
        self._streams = range(len(room.left))
        self._leaving = room.leaving
        self._running = running
        self.n_running = len(running)
        # What can be had, less what those who run need soon; the cells that they took are part of that.
        self._left = [left + taken for left, taken in zip(room.left, room.taken, strict=True)]
        for request in running:
            self._left[stream_of(request)] -= near_need(request)

    def place(self, request: Request) -> Place | None:
        """Where most of its prefix lies, if there is room, else the emptiest arena with room."""
        best, n_cells = self._prefix_of(request), near_need(request)
        if self._left[best.source] >= near_need(request, best.n_cached) + best.n_pinned:
            return best
        for stream in sorted(self._streams, key=lambda s: (-self._left[s], s)):
            if stream != best.source and self._left[stream] >= n_cells:
                # The cached part is copied, if its arena can do without it until then.
                spare = self._left[best.source] >= best.n_pinned
                return replace(best, stream=stream) if spare else Place(stream, source=stream)
        return None

    def take(self, request: Request, place: Place) -> None:
        """The request will run there."""
        linked = place.n_cached if place.stream == place.source else 0
        self._left[place.stream] -= near_need(request, linked)
        self._left[place.source] -= place.n_pinned

    def _prefix_of(self, request: Request) -> Place:
        """The longest computed prefix, where it lies, but for what is to be computed anyhow."""
        limit = request.num_reusable
        leader = request.leader
        if self._prefix is not None:
            salt, ids = request.source.cache_salt, request.token_ids
            match = self._prefix.match(salt, ids, limit, leaving=self._leaving)
            if match.n_tokens:
                return Place(match.stream, match.n_tokens, match.stream, match.n_evictable)
        elif leader is not None and leader in self._running and not leader.num_reclaimed:
            n_shared = min(limit, request.num_prompt - 1, leader.num_computed)
            return Place(stream_of(leader), n_shared, stream_of(leader), fork=leader)
        emptiest = max(self._streams, key=lambda s: (self._left[s], -s))
        return Place(emptiest, source=emptiest)


def check_queue(
    request: Request,
    requests: OpenRequests,
    limits: Limits,
    n_room: Callable[[], int],
    queue_s: Callable[[WaitingQueue], float],
) -> None:
    """Raises QueueFullError if with this request more would wait than may, requests or tokens, even after the
    next step let in whom it can. Siblings do not count: their request does. Who would wait alone may,
    however long. `n_room`: cells that are free or can be had. `queue_s`: seconds that the steps need for
    those who wait. With several configured clients each has its part of both bounds."""
    why_full = _why_full if limits.n_clients < 2 else _why_client_full
    if (why := why_full(request, requests, limits, n_room)) is not None:
        raise QueueFullError(why, retry_after_s=queue_s(requests.waiting))


def _why_full(
    request: Request, requests: OpenRequests, limits: Limits, n_room: Callable[[], int]
) -> str | None:
    n_waiting, most, most_tokens = (
        requests.num_queued,
        limits.max_num_queued_reqs,
        limits.max_num_queued_tokens,
    )
    if n_waiting < most and most_tokens is None:
        return None
    waiting = [*requests.waiting, request]
    n_let_in = _let_in(waiting, requests.running, limits, n_room)
    n_left = n_waiting + 1 - sum(each.leader is None for each in waiting[:n_let_in])
    n_tokens = sum(len(each.token_ids) for each in waiting[n_let_in:] if each.leader is None)
    if n_left > most:
        return f"{n_waiting} requests wait already, at most {most} may"
    if most_tokens is not None and n_tokens > most_tokens and n_left > 1:
        return f"with this request {n_tokens} tokens of prompts would wait, at most {most_tokens} may"
    return None


def _why_client_full(
    request: Request, requests: OpenRequests, limits: Limits, n_room: Callable[[], int]
) -> str | None:
    """Of one client among several. Preempted requests, which were let in before, take no part, nor does a
    request within the client's share of the sequence ids: it is admitted at once."""
    client, n_tokens = request.source.client_id, len(request.token_ids)
    waiting = list(requests.waiting)
    open_now = Counter(r.source.client_id for r in (*requests.running, *waiting))
    if open_now[client] < limits.max_num_seqs // len({*open_now, client}):
        return None
    n_let_in = _let_in([*waiting, request], requests.running, limits, n_room)
    queued = [*waiting[n_let_in:], *requests.restoring]
    held: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for each in queued:
        if each.leader is None and not each.num_preempted:
            held[each.source.client_id] += 1
            tokens[each.source.client_id] += len(each.token_ids)
    reqs = Shares(limits.max_num_queued_reqs, limits.n_clients)
    most_tokens = Shares(limits.max_num_queued_tokens or 0, limits.n_clients)
    if not reqs.allows(held, client):
        return f"{held[client]} requests of this client wait already ({reqs.reserved} places are its own)"
    if limits.max_num_queued_tokens and held[client] and not most_tokens.allows(tokens, client, n_tokens):
        return (
            f"with this request {n_tokens + tokens[client]} tokens of this client's prompts would wait "
            f"({most_tokens.reserved} are its own)"
        )
    return None


def _let_in(
    waiting: Sequence[Request], running: Sequence[Request], limits: Limits, n_room: Callable[[], int]
) -> int:
    """How many of those who wait the next step lets in."""
    n_ids = limits.max_num_seqs - len(running)
    if not n_ids:
        return 0
    n_cells = n_room() - sum(map(near_need, running))
    for n, each in enumerate(waiting[:n_ids]):
        n_cells -= near_need(each)
        if n_cells < 0:
            return n
    return min(n_ids, len(waiting))
