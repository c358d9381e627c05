"""The prefix cache at work: keeps the index and the cells in step, as requests come, compute and go."""

from __future__ import annotations

from collections.abc import Sequence

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

    def _insert(self, request: Request) -> Sequence[CacheEdit]:
        salt, ids = request.source.cache_salt, request.token_ids[: request.num_computed]
        request.lock, edits = self.index.insert(salt, ids, stream_of(request), request.lock)
        self._worker.edit(edits, sequence_of(request))
        return edits


def _n_retained(edits: Sequence[CacheEdit]) -> int:
    """Cells that an insertion took into the cache."""
    return sum(edit.p1 - edit.p0 for edit in edits if isinstance(edit, Retain))
