"""KvCacheManager: changes the KV cells of running requests and of the prefix cache, as the scheduler planned.

`KvCachePlanner` decides which cells a step uses, without side effects. This module changes the prefix cache
and the core, and keeps them consistent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.kv_blocks import KvEvents
from llaisys.engine.kv_cache_planner import (
    KvCachePlanner,
    lookahead_cells,
    max_window_cells,
    reclaimable_end,
)
from llaisys.engine.limits import Limits
from llaisys.engine.prefix_cache import AddNode, CacheEdit, KeepState, Match, Pin, PrefixCache
from llaisys.engine.request import BrokenInvariant, EngineRequest, Request
from llaisys.engine.state_stops import keeps_state
from llaisys.engine.worker import Worker


class KvCacheManager:
    """Owns the prefix cache. A running request pins the path that it is attached to or has inserted.

    A request whose first cells were reclaimed is no longer cached, because a path has all positions from 0.

    - `prefix_cache`: empty if `caches_prefixes` is False.
    - `on_release`: called with salt, tokens and KV stream of a path that a request has cached, when the
      request releases it.
    - Invariants: `request.pin` is set only while the request runs, and pins its first `num_shared` tokens.
      Their cells belong to nodes of the prefix cache; the cells of its other computed tokens are its own.
      Every edit of the prefix cache is applied to the core at once.
    """

    def __init__(self, worker: Worker, limits: Limits, kv_events: KvEvents | None = None) -> None:
        self._worker = worker
        self._blocks = None if kv_events is None else kv_events.blocks
        self._limits = limits
        self._window = worker.attention_window
        self.n_streams = limits.n_streams
        self.caches_prefixes = limits.enable_prefix_caching
        n_states = limits.n_states_kept if limits.state_bytes else None
        self.prefix_cache = PrefixCache(limits.n_streams, n_states)
        self.on_release: Callable[[str, array[int], int], None] | None = None

    @property
    def cache_to_plan(self) -> PrefixCache | None:
        """The prefix cache as the scheduler sees it; None if prefix caching is off."""
        return self.prefix_cache if self.caches_prefixes else None

    @property
    def has_window(self) -> bool:
        """True if every layer has a sliding window, so that cells behind it can be reclaimed."""
        return self._window is not None

    # --- counts ---

    def n_allocatable(self) -> tuple[int, ...]:
        """Return the number of free or evictable cells of each KV stream."""
        return tuple(KvCachePlanner(self._worker.n_cells_free, self.cache_to_plan, ()).allocatable)

    def n_spare(self, stream: int, running: Sequence[Request]) -> int:
        """Return the number of allocatable cells of a KV stream that no running request needs soon."""
        return self.n_allocatable()[stream] - sum(lookahead_cells(r) for r in running if r.stream == stream)

    def window_cells(self, source: EngineRequest) -> int | None:
        """Return the bound on a request's own cells; None if its cells are not reclaimed or may be copied."""
        if self._window is None or source.params.n > 1 or self._limits.n_streams > 1:
            return None
        return max_window_cells(self._window, self._limits.max_num_batched_tokens)

    def totals(self) -> dict[str, Any]:
        """Return the numbers of cells as fields of EngineStats."""
        streams, n_free = range(self.n_streams), sum(self._worker.n_cells_free)
        n_evictable = sum(map(self.prefix_cache.n_evictable, streams))
        return {
            "kv_cells": self._limits.n_cells,
            "kv_cells_used": self._limits.n_cells - n_free - n_evictable,
            "kv_cells_retained": sum(map(self.prefix_cache.n_cached, streams)),
            "kv_cells_free": n_free,
            "recurrent_states_cached": self.prefix_cache.n_states,
            "recurrent_states_max": self.prefix_cache.n_states_max or 0,
        }

    def check(self, running: Sequence[Request]) -> None:
        """Verify that the cells in use are those of requests and prefix cache. Raises BrokenInvariant."""
        self.prefix_cache.check()
        n_own = sum(request.num_own for request in running)
        n_cached = sum(map(self.prefix_cache.n_cached, range(self.n_streams)))
        n_used = self._worker.n_cells_used
        # Without prefix caching, siblings share cells that count for none of them.
        has_forks = not self.caches_prefixes and any(request.num_shared for request in running)
        if n_used < n_own + n_cached or (n_used > n_own + n_cached and not has_forks):
            raise BrokenInvariant(f"{n_used} cells are used; requests own {n_own}, the cache has {n_cached}")
        n_states = self._worker.n_states_kept
        if n_states != self.prefix_cache.n_states:
            raise BrokenInvariant(f"{n_states} states are kept, the cache has {self.prefix_cache.n_states}")

    # --- before a batch ---

    def pin_prefix(self, request: Request, n_tokens: int, stream: int) -> Pin:
        """Pin the first tokens of a request, which are cached in a KV stream, and the state after them."""
        salt, ids = request.source.cache_salt, request.token_ids
        pin, edits = self.prefix_cache.pin(salt, ids, n_tokens, stream, needs_state=True)
        self._apply(edits)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release a pin that no request owns."""
        self.prefix_cache.unpin(pin)

    def evict(self, n_free_wanted: Sequence[int]) -> int:
        """Evict until each KV stream has this many free cells or nothing evictable.

        Return the number of evicted cells.
        """
        n_evicted = 0
        for stream, n_free in enumerate(self._worker.n_cells_free):
            if n_free < n_free_wanted[stream]:
                n, edits = self.prefix_cache.evict(n_free_wanted[stream] - n_free, stream)
                self._apply(edits)
                n_evicted += n
        return n_evicted

    def evict_all(self) -> None:
        """Evict every cached prefix that is not pinned."""
        self.evict([self._limits.n_cells_per_stream] * self.n_streams)

    def would_evict(self, n_free_wanted: int) -> bool:
        """Return True if `evict` would release cells to get this many free ones in each KV stream."""
        return any(
            n_free < n_free_wanted and self.prefix_cache.n_evictable(stream)
            for stream, n_free in enumerate(self._worker.n_cells_free)
        )

    def attach_prefix(self, request: Request, pin: Pin, source: int) -> None:
        """Attach the prefix that `pin` pins in the stream `source` to a newly admitted request.

        Within one KV stream the request keeps the pin; cells copied to another stream are its own.
        """
        self._worker.attach_nodes(pin.parts(), request.seq_id)
        self.prefix_cache.release_state(pin)
        request.num_computed = pin.n_tokens
        if source == request.stream:
            request.pin, request.num_shared = pin, pin.n_tokens
        else:
            self.prefix_cache.unpin(pin)

    def fork(self, request: Request, leader: Request, n_tokens: int) -> None:
        """Fork the first cells of the leader: linked in the same KV stream, copied to another."""
        self._worker.fork_sequence(leader.seq_id, request.seq_id, n_tokens)
        request.num_computed = n_tokens
        if leader.stream == request.stream:
            request.num_shared = n_tokens
            leader.num_shared = max(leader.num_shared, n_tokens)

    # --- after a batch ---

    def cache_computed(self, request: Request) -> None:
        """Cache the tokens that a running request has computed so far.

        Where other requests have cached the same tokens, the request is linked to their cells and its own are
        freed. K and V of equal prefixes have the same bits, so a pinned path is never stored twice.
        """
        if not self.caches_prefixes or request.num_reclaimed:
            return
        n_tokens, n_linked = request.num_computed, request.num_shared
        edits = self._insert(request)
        request.num_shared = n_tokens
        if request.pin is not None and n_linked + _n_added(edits) < n_tokens:
            parts = [(node_id, max(p0, n_linked), p1) for node_id, p0, p1 in request.pin.parts()]
            self._worker.relink_nodes([part for part in parts if part[2] > n_linked], request.seq_id)

    def cache_chunk(self, request: Request) -> None:
        """Cache a computed part of a prompt if the recurrent state after it is worth keeping."""
        if self._limits.n_states_kept and keeps_state(request):
            self.cache_computed(request)

    def reclaim(self, request: Request) -> None:
        """Free the cells behind the attention window, if every layer has one and there are enough of them."""
        end = 0 if self._window is None else reclaimable_end(request, self._window)
        if end:
            self._worker.reclaim_cells(request.seq_id, end)
            self._unpin_request(request)
            request.num_shared, request.num_reclaimed = 0, end

    def free(self, request: Request, *, is_valid: bool) -> None:
        """Release a running request's sequence, cells and pin. Its computed tokens stay cached and evictable.

        If its K and V are not valid, the tokens that only this request has cached are invalidated instead.
        """
        if self.caches_prefixes and is_valid:
            if request.num_own and not request.num_reclaimed:
                self._insert(request)
            if self.on_release is not None and request.pin is not None:
                ids = request.token_ids[: request.pin.n_tokens]
                self.on_release(request.source.cache_salt, ids, request.stream)
            self._unpin_request(request)
        elif self.caches_prefixes:
            self._unpin_request(request)
            salt, ids = request.source.cache_salt, request.token_ids
            self.invalidate(salt, ids, request.stream, request.num_cached or 0)
        self._worker.close_sequence(request.seq_id)
        request.num_computed = request.num_shared = request.num_reclaimed = 0

    # --- for sessions and the disk tier ---

    def match_to_load(self, salt: str, ids: Sequence[int], n_available: Callable[[int], int]) -> Match:
        """Return the longest cached part of a path, in the KV stream in which the rest is to be loaded.

        If no part is cached, this is the stream with the most available cells.
        """
        match = self.prefix_cache.match(salt, ids, len(ids))
        return match if match.n_same else replace(match, stream=max(range(self.n_streams), key=n_available))

    def fingerprint(self) -> str:
        """Return a digest of everything that K and V depend on except tokens and positions."""
        return self._worker.fingerprint()

    def pin_session(
        self, salt: str, ids: Sequence[int], stream: int, *, is_restoring: bool = False
    ) -> Pin | None:
        """Pin the cached part of a session's path, and its recurrent state; None if nothing is cached.

        `is_restoring`: pin also the cells whose recurrent state is not restored yet.
        """
        match = self.prefix_cache.match(salt, ids, len(ids), stream)
        n_tokens = match.n_same if is_restoring else match.n_tokens
        pin, edits = self.prefix_cache.pin(salt, ids, n_tokens, stream, of_session=True, needs_state=True)
        self._apply(edits)
        if pin.n_tokens:
            return pin
        self.prefix_cache.unpin(pin)
        return None

    def export_cells(
        self, salt: str, ids: Sequence[int], stream: int, at: int, n_max: int
    ) -> NDArray[np.uint8] | None:
        """Return K and V of up to `n_max` positions from `at` on, as bytes `[n]`.

        None if the position `at` is not cached.
        """
        for node_id, p0, p1 in self.prefix_cache.match(salt, ids, len(ids), stream).parts:
            if p0 <= at < p1:
                return self._worker.export_cells(node_id, at, min(p1, at + n_max))
        return None

    def import_cells(
        self, salt: str, ids: Sequence[int], stream: int, at: int, data: NDArray[np.uint8]
    ) -> bool:
        """Cache the path `ids`, whose K and V from position `at` on are `data`; evict cells if needed.

        Return False, without side effects on cached paths, if the positions before `at` are not cached or
        there are too few cells.
        """
        n_positions = len(ids) - at
        self.evict([n_positions if s == stream else 0 for s in range(self.n_streams)])
        n_cached = self.prefix_cache.match(salt, ids, len(ids), stream).n_same
        if n_cached < at or self._worker.n_cells_free[stream] < n_positions:
            return False
        pin, edits = self.prefix_cache.insert(salt, ids, stream)
        for edit in edits:
            if isinstance(edit, AddNode):
                self._worker.import_cells(edit, stream, at, data)
            else:
                self._worker.edit_cache([edit])
        if self._blocks is not None:
            self._blocks.apply(edits, salt, ids)
        self.prefix_cache.unpin(pin)
        return True

    def export_state(
        self, salt: str, ids: Sequence[int], stream: int
    ) -> tuple[int, NDArray[np.uint8]] | None:
        """Return the last kept recurrent state of a path: the number of tokens before it, and its bytes.

        None if no state is kept.
        """
        match = self.prefix_cache.match(salt, ids, len(ids), stream)
        if self.prefix_cache.n_states_max is None or not match.parts:
            return None
        return match.n_tokens, self._worker.export_state(match.parts[-1][0])

    def import_state(self, salt: str, ids: Sequence[int], stream: int, data: NDArray[np.uint8]) -> None:
        """Keep the recurrent state after `ids`, unless the path is not cached or pins need all states."""
        pin, edits = self.prefix_cache.pin(salt, ids, len(ids), stream)
        self._apply(edits)
        for edit in self.prefix_cache.keep_state(pin) if pin.n_tokens == len(ids) else ():
            if isinstance(edit, KeepState):
                self._worker.import_state(edit.node_id, data)
            else:
                self._worker.edit_cache([edit])
        self.prefix_cache.unpin(pin)

    def invalidate(self, salt: str, ids: Sequence[int], stream: int, start: int) -> None:
        """Remove the positions of a path from `start` on from the prefix cache, except pinned ones."""
        self._apply(self.prefix_cache.invalidate(salt, ids, stream, start))

    # --- inside ---

    def _insert(self, request: Request) -> Sequence[CacheEdit]:
        salt, ids = request.source.cache_salt, request.token_ids[: request.num_computed]
        request.pin, edits = self.prefix_cache.insert(salt, ids, request.stream, request.pin)
        self._worker.edit_cache(edits, request.seq_id)
        # Drafts that were accepted behind the token that ended the request are in its state.
        if self.prefix_cache.n_states_max and self._worker.sequence_end(request.seq_id) == len(ids):
            self._worker.edit_cache(self.prefix_cache.keep_state(request.pin), request.seq_id)
        if self._blocks is not None:
            self._blocks.apply(edits, salt, ids)
        return edits

    def _apply(self, edits: Sequence[CacheEdit]) -> None:
        """Apply edits that add no node."""
        self._worker.edit_cache(edits)
        if self._blocks is not None:
            self._blocks.apply(edits)

    def _unpin_request(self, request: Request) -> None:
        if request.pin is not None:
            self.prefix_cache.unpin(request.pin)
            request.pin = None


def _n_added(edits: Sequence[CacheEdit]) -> int:
    """Return the number of cells that an insertion added to the cache."""
    return sum(edit.p1 - edit.p0 for edit in edits if isinstance(edit, AddNode))
