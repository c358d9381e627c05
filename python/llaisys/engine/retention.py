"""The prefix cache at work: keeps the index and the cells in step, as requests come, compute and go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.cells import stream_of
from llaisys.engine.prefix import CacheEdit, Lock, PrefixIndex, Retain
from llaisys.engine.request import Request
from llaisys.engine.worker import Worker, sequence_of


class Retention:
    """Owns the prefix index. A request that runs pins the path that it was attached to or has inserted.

    What has given back its first cells is in no path that is cached later: a path has all positions from 0.

    Invariants: `request.lock` is set only while it runs, and pins its first `num_shared` tokens; their cells
    are those of the index's segments, the cells of its other computed tokens are its own. Every edit of the
    index is carried out on the core at once.
    """

    def __init__(self, worker: Worker, n_streams: int) -> None:
        self._worker = worker
        self.n_streams = n_streams
        self.index = PrefixIndex(n_streams)

    def pin(self, request: Request, n_tokens: int, stream: int) -> Lock:
        """Keeps the first tokens of a request, which are cached in an arena, from being evicted."""
        salt, ids = request.source.cache_salt, request.token_ids
        lock, edits = self.index.lock(salt, ids, n_tokens, stream)
        self._worker.edit(edits)
        return lock

    def unpin(self, lock: Lock) -> None:
        """Gives a pin back that no request has."""
        self.index.unlock(lock)

    def attach(self, request: Request, lock: Lock, source: int) -> None:
        """The request, which has just got its sequence, sees what `lock` pins in the arena `source`.

        Within one arena it keeps the lock; what was copied to another is its own.
        """
        salt, ids = request.source.cache_salt, request.token_ids
        match = self.index.match(salt, ids, lock.n_tokens, source)
        self._worker.attach(match.parts, sequence_of(request))
        request.num_computed = lock.n_tokens
        if source == stream_of(request):
            request.lock, request.num_shared = lock, lock.n_tokens
        else:
            self.index.unlock(lock)

    def publish(self, request: Request) -> None:
        """Lets others have what a running request has computed so far.

        Where others cached the same tokens meanwhile, the request is linked to their cells and its own are
        freed: K and V of equal prefixes are the same bits, and a pinned path is never held twice.
        """
        if request.num_reclaimed:
            return
        n_tokens, n_linked = request.num_computed, request.num_shared
        edits = self._insert(request)
        request.num_shared = n_tokens
        if n_linked + _n_retained(edits) < n_tokens:
            match = self.index.match(
                request.source.cache_salt, request.token_ids, n_tokens, stream_of(request)
            )
            parts = [(segment, max(p0, n_linked), p1) for segment, p0, p1 in match.parts if p1 > n_linked]
            self._worker.relink(parts, sequence_of(request), n_linked)

    def leave(self, request: Request) -> None:
        """A running request is about to return its sequence: what it computed stays, and can be evicted."""
        if request.num_own and not request.num_reclaimed:
            self._insert(request)
        self.let_go(request)

    def let_go(self, request: Request) -> None:
        """A running request sees no cell of its pinned path any more, or is about to return its sequence."""
        if request.lock is not None:
            self.index.unlock(request.lock)
            request.lock = None

    def forget(self, request: Request) -> None:
        """As `leave`, for a request whose K and V are not to be trusted: what it alone cached is dropped."""
        salt, ids = request.source.cache_salt, request.token_ids
        self.let_go(request)
        start = request.num_cached or 0
        self._worker.edit(self.index.drop(salt, ids, stream_of(request), start))

    def make_room(self, n_free_wanted: Sequence[int]) -> int:
        """Evicts until so many cells of each arena are free, or nothing is left; returns how many."""
        n_evicted = 0
        for stream, n_free in enumerate(self._worker.n_cells_free):
            if n_free < n_free_wanted[stream]:
                n, edits = self.index.evict(n_free_wanted[stream] - n_free, stream)
                self._worker.edit(edits)
                n_evicted += n
        return n_evicted

    def would_evict(self, n_free_wanted: int) -> bool:
        """True if `make_room` would evict for so many free cells of each KV stream."""
        return any(
            n_free < n_free_wanted and self.index.n_evictable(stream)
            for stream, n_free in enumerate(self._worker.n_cells_free)
        )

    # --- for sessions ---

    def fingerprint(self) -> str:
        """What K and V depend on besides tokens. The first call hashes the weights."""
        return self._worker.fingerprint()

    def keep(self, salt: str, ids: Sequence[int], stream: int) -> Lock | None:
        """Pins what is cached of a path for a session; None if that is nothing."""
        lock, edits = self.index.lock(salt, ids, len(ids), stream, of_session=True)
        self._worker.edit(edits)
        if lock.n_tokens:
            return lock
        self.index.unlock(lock)
        return None

    def export(
        self, salt: str, ids: Sequence[int], stream: int, at: int, n_most: int
    ) -> NDArray[np.uint8] | None:
        """K and V of `n_most` positions from `at` on, or fewer; None if `at` is not cached."""
        for segment, p0, p1 in self.index.match(salt, ids, len(ids), stream).parts:
            if p0 <= at < p1:
                return self._worker.export_cells(segment, at, min(p1, at + n_most))
        return None

    def load(self, salt: str, ids: Sequence[int], stream: int, at: int, data: NDArray[np.uint8]) -> bool:
        """Caches the path `ids`; `data` has K and V from position `at` on. Evicts for it.

        False, and nothing was cached: what is before `at` is not cached, or the arena has too few cells.
        """
        n_positions = len(ids) - at
        self.make_room([n_positions if s == stream else 0 for s in range(self.n_streams)])
        n_cached = self.index.match(salt, ids, len(ids), stream).n_tokens
        if n_cached < at or self._worker.n_cells_free[stream] < n_positions:
            return False
        lock, edits = self.index.insert(salt, ids, stream)
        for edit in edits:
            if isinstance(edit, Retain):
                self._worker.import_cells(edit, stream, at, data)
            else:
                self._worker.edit([edit])
        self.index.unlock(lock)
        return True

    def drop(self, salt: str, ids: Sequence[int], stream: int, start: int) -> None:
        """Forgets the positions from `start` on of a path, but for what is pinned."""
        self._worker.edit(self.index.drop(salt, ids, stream, start))

    def _insert(self, request: Request) -> Sequence[CacheEdit]:
        salt, ids = request.source.cache_salt, request.token_ids[: request.num_computed]
        request.lock, edits = self.index.insert(salt, ids, stream_of(request), request.lock)
        self._worker.edit(edits, sequence_of(request))
        return edits


def _n_retained(edits: Sequence[CacheEdit]) -> int:
    """Cells that an insertion took into the cache."""
    return sum(edit.p1 - edit.p0 for edit in edits if isinstance(edit, Retain))
