"""DiskCache: writes cached prefixes to disk in blocks, and loads them for new requests.

The engine thread exports and imports at most one piece of K and V in a step; two other threads read and write
files, so a step never waits for the disk.

- A path of the prefix cache is written after its request has ended, while it is still in memory. So nothing
  waits for the disk when it is evicted. While requests run, writing takes a small share of the time.
- A new request whose prompt continues on disk waits in `WAITING_FOR_REMOTE_KVS`, outside the queue. Loaded
  blocks become nodes of the prefix cache that nothing pins. Then the request is queued, and finds them in
  memory. If they were evicted before, it computes them, with the same bits.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from numpy import uint8
from numpy.typing import NDArray

from llaisys.engine.disk_cache import block_index
from llaisys.engine.disk_cache.block_index import BlockIndex, LoadCost, block_keys
from llaisys.engine.disk_cache.block_store import SETTING, BlockStore, WrittenBlock
from llaisys.engine.kv_cache_manager import KvCacheManager
from llaisys.engine.limits import Limits
from llaisys.engine.prefix_tree import as_ids
from llaisys.engine.request import Request, WaitingForRemoteKvs
from llaisys.engine.sessions import transfer
from llaisys.engine.stats import EngineStatsRecorder
from llaisys.errors import CoreFaultError, RejectedError

# Requests that wait for a load at most; a further one computes its prompt.
LOADS_MAX = 64
# Seconds for writing what is not on disk yet when the engine is closed.
DRAIN_S = 5.0
# While requests run, the next block is written after this many times the time that the last one took.
_BUSY_PAUSE = 40
# Seconds that a load waits for one block. All requests that load compute their prompts then.
READ_LIMIT_S = 10.0
# Seconds without writes after the disk has failed, and without loads after it did not answer.
FAILED_PAUSE_S = 30.0

log = logging.getLogger(__name__)

# Work that is resumed in a later step, once the file I/O that it yielded is done.
_Steps: TypeAlias = Generator[Future[Any] | None, None, None]


@dataclass(frozen=True, slots=True)
class DiskCacheCallbacks:
    """The functions of the engine that the disk tier calls.

    - `n_available_cells`: returns the number of free or evictable cells of a KV stream that no running
      request needs soon.
    - `end_load`: queues a request that waited for a load.
    - `clock`: seconds, for the speed of loads and the share of writes.
    """

    n_available_cells: Callable[[int], int]
    end_load: Callable[[Request], None]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Path:
    """The tokens of a cached path, in the tree of a salt and a KV stream."""

    salt: str
    stream: int
    ids: array[int]


@dataclass(slots=True)
class _Work:
    """The work in progress, and the file I/O that it waits for, since `since_s`. Its request, if it is a
    load."""

    steps: _Steps
    future: Future[Any] | None = None
    request: Request | None = None
    since_s: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.future is None or self.future.done()


class DiskCache:
    """The disk tier of one engine. Engine thread only.

    Invariants: at most one load and one write are in progress. Each request for which `begin_load` returned
    True is passed to `end_load` once, unless it ends before. Nothing here pins cells.
    """

    def __init__(
        self,
        kv_cache: KvCacheManager,
        limits: Limits,
        stats: EngineStatsRecorder,
        callbacks: DiskCacheCallbacks,
    ) -> None:
        """Open the folder, and find the blocks in it. Raises RejectedError naming the setting."""
        assert limits.prefix_cache_dir is not None
        self._kv_cache, self._stats, self._callbacks = kv_cache, stats, callbacks
        self._clock = callbacks.clock
        spec = transfer.file_spec(kv_cache, limits)
        self._n_block, self._n_piece = block_index.BLOCK_TOKENS, spec.n_piece
        self._cell_bytes, self._fingerprint = spec.cell_bytes, spec.fingerprint
        self._store = BlockStore(limits.prefix_cache_dir, replace(spec, n_tokens_max=self._n_block))
        n_bytes_max, self._block_bytes = limits.prefix_cache_disk_bytes, self._store.block_bytes_max
        if n_bytes_max < self._block_bytes:
            raise RejectedError(
                f"prefix_cache_disk_bytes is {n_bytes_max}, one block of {self._n_block} tokens takes up to "
                f"{self._block_bytes} bytes; raise it",
                param="prefix_cache_disk_bytes",
            )
        self._secret, blocks = self._store.open()
        self._index, self._cost = BlockIndex(n_bytes_max, blocks), LoadCost()
        self._store.delete(self._index.make_space(0))
        log.info("%s: %d cached blocks, %d bytes", SETTING, len(self._index), self._index.n_bytes)
        # One thread for a write, one for a read, so that a load does not wait for a sync.
        self._pool = ThreadPoolExecutor(2, "llaisys-disk-cache")
        self._loads: deque[_Work] = deque()
        self._write: _Work | None = None
        # Paths to write, the least recently used first. Their tokens are at most those of the KV cache.
        self._released: deque[_Path] = deque()
        self._n_released, self._n_released_max = 0, limits.n_cells
        self._write_after_s = self._paused_until_s = self._load_after_s = float("-inf")
        # Called on another thread when file I/O is done, so that `resume` has work.
        self.wake: Callable[[], None] = lambda: None
        kv_cache.on_release = self._release

    @property
    def is_ready(self) -> bool:
        """True if `resume` would do something while no request runs."""
        return bool(self._loads and self._loads[0].is_ready) or self._can_write()

    def begin_load(self, request: Request) -> bool:
        """Look a new request's prompt up on disk. Return True if the request waits for a load."""
        salt, ids = request.source.cache_salt, request.token_ids
        n_cached = self._kv_cache.prefix_cache.match(salt, ids, request.num_reusable).n_tokens
        self._stats.external_query_tokens += request.num_prompt - n_cached
        keys = self._keys(salt, ids)
        first = n_cached // self._n_block
        n_blocks = self._index.n_consecutive(keys, first)
        end = min((first + n_blocks) * self._n_block, request.num_reusable)
        if end <= n_cached or len(self._loads) >= LOADS_MAX or self._clock() < self._load_after_s:
            return False
        prefill_token_s = self._stats.speed.prefill_token_s
        if not self._cost.is_faster(n_blocks * self._n_block, end - n_cached, prefill_token_s):
            return False
        end = (first + n_blocks) * self._n_block
        self._loads.append(_Work(self._load_path(salt, ids[:end], keys[: first + n_blocks]), request=request))
        return True

    def resume(self, *, is_idle: bool) -> None:
        """Move at most one piece: of the first load, otherwise of a write.

        `is_idle`: no request runs or is queued, so writing delays none.
        """
        while self._loads and not _waits(self._loads[0].request):
            self._loads.popleft().steps.close()  # canceled or expired
        if self._loads and self._loads[0].is_ready:
            if not self._advance(self._loads[0]):
                self._end_load(self._loads.popleft())
        elif self._loads and self._clock() - self._loads[0].since_s > READ_LIMIT_S:
            log.warning("%s: the disk did not answer within %g s", SETTING, READ_LIMIT_S)
            self._load_after_s = self._clock() + FAILED_PAUSE_S
            while self._loads:
                self._end_load(self._loads.popleft())
        elif self._can_write() and (is_idle or self._clock() >= self._write_after_s):
            self._resume_write()

    def drain(self, limit_s: float = DRAIN_S) -> None:
        """Write all cached prefixes that are not on disk, the most recently used first.

        After `limit_s` seconds the rest is dropped, and a block in progress is not finished.
        """
        until_s = self._clock() + limit_s
        paths = [_Path(*path) for path in self._kv_cache.prefix_cache.paths()]
        writes = [self._write] if self._write is not None else []
        for work in (*writes, *(_Work(self._write_path(path)) for path in paths)):
            while True:
                left_s = until_s - self._clock()
                if left_s > 0 and work.future is not None:
                    wait([work.future], left_s)
                if left_s <= 0 or not work.is_ready:
                    self._store.abandon()
                    log.warning("%s: not all prefixes were written within %g s", SETTING, limit_s)
                    return
                if not self._advance(work):
                    break
            if self._clock() < self._paused_until_s:  # the disk has failed
                return

    def close(self) -> None:
        """End all work without results, wait for file I/O in progress, and unlock the folder. Idempotent."""
        self._kv_cache.on_release = None
        self._store.abandon()
        self._pool.shutdown(cancel_futures=True)
        self._store.close()

    # --- inside ---

    def _keys(self, salt: str, ids: Sequence[int]) -> list[bytes]:
        return block_keys(self._secret, self._fingerprint, salt, ids, n_tokens=self._n_block)

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        try:
            future = self._pool.submit(function, *arguments)
        except RuntimeError:
            # The interpreter exits and starts no threads. A program that did not close its engine drains now.
            future = Future()
            future.set_result(function(*arguments))
        future.add_done_callback(lambda _: self.wake())
        return future

    def _advance(self, work: _Work) -> bool:
        """Resume work once; return False if it has ended."""
        try:
            work.future, work.since_s = next(work.steps), self._clock()
        except StopIteration:
            return False
        return True

    def _end_load(self, work: _Work) -> None:
        work.steps.close()
        if work.request is not None and _waits(work.request):
            self._callbacks.end_load(work.request)

    # --- loads ---

    def _load_path(self, salt: str, ids: array[int], keys: Sequence[bytes]) -> _Steps:
        """Cache the blocks `keys` of the path `ids`, up to the first miss or lack of cells."""
        begin_s = self._clock()
        # Again, because another request may have computed or loaded some of them since the lookup.
        match = self._kv_cache.match_to_load(salt, ids, self._callbacks.n_available_cells)
        path, n_cached = _Path(salt, match.stream, ids), match.n_tokens
        first = n_cached // self._n_block
        begin = at = first * self._n_block

        def read(i: int) -> Future[Any]:
            block = ids[i * self._n_block : (i + 1) * self._n_block]
            return self._submit(self._store.read, keys[i], block)

        ahead = read(first) if first < len(keys) else None
        for i in range(first, len(keys)):
            future = ahead
            assert future is not None
            ahead = read(i + 1) if i + 1 < len(keys) else None
            yield future
            pieces = future.result()
            if pieces is None:
                self._index.remove(keys[i])
                break
            n_before = at
            for piece in pieces:
                end = at + len(piece) // self._cell_bytes
                if not self._import(path, at, end, piece):
                    break
                at = end
                yield None
            if at < n_before + self._n_block:
                break
        self._stats.external_hit_tokens += max(0, at - n_cached)
        if at > begin:
            self._cost.observe(self._clock() - begin_s, at - begin)

    def _import(self, path: _Path, at: int, end: int, data: NDArray[uint8]) -> bool:
        """Cache the positions `at <= p < end` of a path. Return False if there are too few cells."""
        kv_cache, ids, stream = self._kv_cache, path.ids[:end], path.stream
        if kv_cache.prefix_cache.match(path.salt, ids, end, stream).n_same == end:
            return True
        if self._callbacks.n_available_cells(stream) < end - at:
            return False
        return kv_cache.import_cells(path.salt, ids, stream, at, data)

    # --- writes ---

    def _release(self, salt: str, ids: Sequence[int], stream: int) -> None:
        """Queue a path that a request has computed for writing; drop the oldest ones above the bound."""
        self._released.append(_Path(salt, stream, as_ids(ids)))
        self._n_released += len(ids)
        while self._n_released > self._n_released_max:
            self._n_released -= len(self._released.popleft().ids)

    def _can_write(self) -> bool:
        has_work = bool(self._released) if self._write is None else self._write.is_ready
        return has_work and self._clock() >= self._paused_until_s

    def _resume_write(self) -> None:
        if self._write is None:
            path = self._released.popleft()
            self._n_released -= len(path.ids)
            self._write = _Work(self._write_path(path))
        if not self._advance(self._write):
            self._write = None

    def _write_path(self, path: _Path) -> _Steps:
        """Write the blocks of a path that are not on disk, from the first on; all count as used now."""
        keys = self._keys(path.salt, path.ids)
        # A path that is larger than the folder may be would only replace its own blocks.
        keys = keys[: self._index.n_bytes_max // self._block_bytes]
        self._index.touch(keys)
        for i, key in enumerate(keys):
            if key in self._index:
                continue
            start = i * self._n_block
            pieces, at, end = [], start, start + self._n_block
            while at < end:
                data = self._export(path, at, end)
                if data is None:  # evicted
                    return
                pieces.append(data)
                at += len(data) // self._cell_bytes
                yield None
            dropped = self._index.make_space(self._block_bytes)
            future = self._submit(self._store.write, key, path.ids[start:end], pieces, dropped)
            yield future
            written: WrittenBlock | None = future.result()
            if written is None:
                self._paused_until_s = self._clock() + FAILED_PAUSE_S
                return
            self._index.add(key, written.n_bytes)
            self._index.touch(keys[: i + 1])
            self._pause(written.cpu_s)
        yield self._submit(self._store.touch, keys)

    def _export(self, path: _Path, at: int, end: int) -> NDArray[uint8] | None:
        """Return K and V of positions from `at` on, as one piece; None if they are not cached."""
        begin_s = self._clock()
        n_max = min(self._n_piece, end - at)
        try:
            return self._kv_cache.export_cells(path.salt, path.ids[:end], path.stream, at, n_max)
        except CoreFaultError as fault:  # an export has no side effects
            log.warning("%s: a prefix could not be read: %s", SETTING, fault)
            return None
        finally:
            self._pause(self._clock() - begin_s)

    def _pause(self, seconds: float) -> None:
        """Delay the next write, because this one took `seconds` of CPU time."""
        self._write_after_s = max(self._write_after_s, self._clock()) + _BUSY_PAUSE * seconds


def _waits(request: Request | None) -> bool:
    return request is not None and isinstance(request.state, WaitingForRemoteKvs)
