"""KvCachePlanner: plans the KV cells of one step and the admission of waiting requests. Pure.

A cell is allocatable if it is free or if the prefix cache can evict it. A request is admitted if the cells
that it and the running requests need soon are allocatable. If all of them continue for long, the scheduler
preempts some of them later. A request that was preempted PREEMPTIONS_MAX times is worst-case reserved. While
it runs, the cells of its worst case are set aside, and no other request may allocate them.

`KvCacheManager` applies the decisions to the core. Planning is separate because the scheduler may plan a step
several times, and only the last plan is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from llaisys.engine.prefix_cache import PrefixCache
from llaisys.engine.request import Request

# Output tokens for which an admitted request must find cells, so that it runs this many steps.
LOOKAHEAD_TOKENS = 8
# Cells behind a window are reclaimed this many at a time, with one call to the core.
RECLAIM_TOKENS = 64


def lookahead_cells(request: Request, n_cached: int = 0) -> int:
    """Return the number of cells that a request needs soon, in addition to those of its computed tokens.

    For a worst-case-reserved request this is its worst case. `n_cached`: tokens already computed at its
    admission.
    """
    n_computed = request.num_computed + n_cached
    if request.worst_case_reserved:
        return request.token_limit - n_computed
    need = min(request.token_limit, len(request.token_ids) + LOOKAHEAD_TOKENS) - n_computed
    return need if request.window_cells is None else min(need, request.window_cells - request.num_own)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an admitted request starts: in the KV stream `stream`, with its first `n_cached` tokens computed.

    Those tokens are in the stream `source`: in cells of the sibling `fork`, otherwise in the prefix cache.
    There, the admission pins `n_pinned` evictable cells. `n_same`: the tokens that the prefix cache has,
    including those after the last kept recurrent state.
    """

    stream: int
    n_cached: int = 0
    source: int = 0
    n_pinned: int = 0
    n_same: int = 0
    fork: Request | None = None


class KvCachePlanner:
    """The cells of one plan by KV stream, updated with each decision of the plan.

    - `allocatable`: cells that are free or evictable. `allocated`: cells that must be free when the batch
      runs.
    - Invariant: `allocatable` covers the cells set aside for worst-case-reserved requests if it did so at
      first.
    """

    def __init__(
        self,
        n_free: Sequence[int],
        prefix_cache: PrefixCache | None,
        running: Sequence[Request],
        *,
        forks: bool = True,
    ) -> None:
        """`forks`: without a prefix cache, a choice starts from the cells of its leader."""
        self._prefix_cache = prefix_cache
        self._forks = forks
        self._running = running
        n_evictable = (lambda _: 0) if prefix_cache is None else prefix_cache.n_evictable
        self.allocatable = [n + n_evictable(stream) for stream, n in enumerate(n_free)]
        self.allocated = [0] * len(n_free)
        self._freed: list[Request] = []
        self._reserved = [0] * len(n_free)
        for request in running:
            if request.worst_case_reserved:
                self._reserved[request.stream] += lookahead_cells(request)
        # Cells that running and admitted requests need soon; computed for the first admission.
        self._needed_soon: list[int] | None = None

    # --- running requests ---

    def available(self, request: Request, stream: int) -> int:
        """Return the number of cells that a request may allocate now."""
        return self.allocatable[stream] - (0 if request.worst_case_reserved else self._reserved[stream])

    def allocate(self, request: Request, stream: int, n_cells: int) -> None:
        """Allocate cells for a request, at most those available to it; a negative number returns cells."""
        self.allocatable[stream] -= n_cells
        self.allocated[stream] += n_cells
        if request.worst_case_reserved:
            self._reserved[stream] -= n_cells

    def allocate_one_each(self, requests: Sequence[Request]) -> bool:
        """Allocate one cell for each of these running requests.

        Return False, without side effects, if there are too few unreserved cells.
        """
        n = len(requests)
        if any(n > left - reserved for left, reserved in zip(self.allocatable, self._reserved, strict=True)):
            return False
        if len(self.allocatable) == 1 and not self._reserved[0]:
            self.allocatable[0] -= n
            self.allocated[0] += n
        else:
            for request in requests:
                self.allocate(request, request.stream, 1)
        return True

    def free(self, request: Request) -> None:
        """Stop a running request: its own cells become free, and those that only it pins become evictable.

        This is a lower bound: cells shared with another stopped request are not counted.
        """
        stream, pin = request.stream, request.pin
        private = 0 if pin is None or self._prefix_cache is None else self._prefix_cache.n_private(pin)
        self.allocatable[stream] += request.num_own + private
        self._freed.append(request)
        if request.worst_case_reserved:
            self._reserved[stream] -= lookahead_cells(request)
        if self._needed_soon is not None:
            self._needed_soon[stream] -= lookahead_cells(request)

    def without(self, requests: Sequence[Request]) -> KvCachePlanner:
        """Return a copy of this planner in which these running requests have stopped."""
        other = copy(self)
        other.allocatable, other.allocated = [*self.allocatable], [*self.allocated]
        other._reserved, other._freed = [*self._reserved], [*self._freed]
        other._needed_soon = [*self._sum_needed_soon()]
        for request in requests:
            other.free(request)
        return other

    # --- waiting requests ---

    def can_admit(self, request: Request) -> Placement | None:
        """Return where a waiting request can start, or None if there are too few cells.

        Prefer the KV stream with the longest cached prefix, then the one with the most free cells.
        """
        left = [
            allocatable + allocated - needed
            for allocatable, allocated, needed in zip(
                self.allocatable, self.allocated, self._sum_needed_soon(), strict=True
            )
        ]
        best, n_cells = self._place_at_prefix(request, left), lookahead_cells(request)
        if left[best.source] >= lookahead_cells(request, best.n_cached) + best.n_pinned:
            return best
        for stream in sorted(range(len(left)), key=lambda s: (-left[s], s)):
            if stream != best.source and left[stream] >= n_cells:
                # The cached part is copied if it can stay in its own stream until then.
                can_copy = left[best.source] >= best.n_pinned
                alone = Placement(stream, source=stream, n_same=best.n_same)
                return replace(best, stream=stream) if can_copy else alone
        return None

    def admit(self, request: Request, placement: Placement) -> None:
        """Admit a request at `placement`. Pin the cells that it reuses; allocate cells for those to copy."""
        stream, source = placement.stream, placement.source
        self.allocatable[source] -= placement.n_pinned
        if request.worst_case_reserved:
            self._reserved[stream] += lookahead_cells(request, placement.n_cached)
        if stream != source:
            self.allocatable[stream] -= placement.n_cached
            self.allocated[stream] += placement.n_cached
        n_linked = placement.n_cached if stream == source else 0
        self._sum_needed_soon()[stream] += lookahead_cells(request, n_linked)

    def _place_at_prefix(self, request: Request, left: Sequence[int]) -> Placement:
        """Return the placement that reuses the longest computed prefix, up to `num_reusable` tokens."""
        limit, leader, n_same = request.num_reusable, request.leader, 0
        if self._prefix_cache is not None:
            salt, ids = request.source.cache_salt, request.token_ids
            releasing = [freed.pin for freed in self._freed if freed.pin is not None]
            match = self._prefix_cache.match(salt, ids, limit, releasing=releasing)
            if match.n_tokens:
                return Placement(match.stream, match.n_tokens, match.stream, match.n_evictable, match.n_same)
            n_same = match.n_same
        elif self._forks and leader is not None and self._runs(leader) and not leader.num_reclaimed:
            n_shared = min(limit, request.num_prompt - 1, leader.num_computed)
            return Placement(leader.stream, n_shared, leader.stream, fork=leader)
        emptiest = max(range(len(left)), key=lambda s: (left[s], -s))
        return Placement(emptiest, source=emptiest, n_same=n_same)

    def _runs(self, request: Request) -> bool:
        return request in self._running and request not in self._freed

    def _sum_needed_soon(self) -> list[int]:
        if self._needed_soon is None:
            self._needed_soon = [0] * len(self.allocatable)
            for request in self._running:
                if request not in self._freed:
                    self._needed_soon[request.stream] += lookahead_cells(request)
        return self._needed_soon


# --- reclaiming behind a sliding window ---


def reclaimable_end(request: Request, window: int) -> int:
    """Return the position below which a running request's cells can be reclaimed; 0 if there are too few.

    A row at position `p` sees the positions above `p - window`, its own included. So the next row of a
    request with `num_computed` tokens sees no position below `num_computed + 1 - window`, nor does any later
    row. Cells shared with the prefix cache or a sibling are reclaimed all at once, because a request pins a
    whole path.
    """
    end = request.num_computed + 1 - window
    return end if end >= max(request.num_shared, request.num_reclaimed + RECLAIM_TOKENS) else 0


def max_window_cells(window: int, max_num_batched_tokens: int) -> int:
    """Return the bound on a request's own cells during a step if its cells are reclaimed after each step."""
    return window + RECLAIM_TOKENS + max_num_batched_tokens
