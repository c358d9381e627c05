"""SessionRequestHandler: executes session requests on the engine thread, with file I/O on a second thread.

A save or a restore is a generator. It yields a piece of file I/O, is resumed when that is done, and exports
or imports the cells of one piece in between. `continue_transfer` resumes one transfer, so a step of the
engine waits for at most one piece. A save pins nothing; it ends at the first evicted cells. A restored piece
is pinned with its session, so it is unpinned when requests need the cells.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.kv_cache_manager import KvCacheManager
from llaisys.engine.limits import Limits
from llaisys.engine.sessions.file import SUFFIX, Adapter, SessionFileSpec, SessionReader, SessionWriter
from llaisys.engine.sessions.manager import Session, SessionManager, SessionReply, SessionRequest, check_name
from llaisys.errors import (
    CoreFaultError,
    EngineDeadError,
    LlaisysError,
    RequestFailedError,
    UnsupportedError,
)
from llaisys.session_info import SessionInfo

# Maximum bytes of K and V in a piece of a file; a piece has at least one position.
PIECE_BYTES = 2**22

log = logging.getLogger(__name__)

_Steps: TypeAlias = Generator[Callable[[], Any], Any, None]


class LoraSalts(Protocol):
    """The LoRA adapters in the salts of cached prefixes; see `LoraManager`."""

    def adapter_of(self, salt: str) -> Adapter:
        """Return the adapter in a salt."""

    def salt_of(self, salt: str, adapter: Adapter) -> str:
        """Return the salt that contains an adapter. Raises RejectedError unless it is loaded."""


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """The functions of the engine that a transfer calls.

    - `n_available_cells`: returns the number of free or evictable cells of a KV stream that no running
      request needs soon.
    - `loras`: the LoRA adapters in salts.
    - `begin_restore`: makes the session's requests wait. `end_restore`: lets them continue, or ends them with
      an error.
    """

    n_available_cells: Callable[[int], int]
    begin_restore: Callable[[Session], None]
    end_restore: Callable[[Session, LlaisysError | None], None]
    loras: LoraSalts


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A save or a restore in progress, which waits for the file I/O `work`."""

    call_id: int
    session: Session
    steps: _Steps
    work: Future[Any]


class SessionRequestHandler:
    """Executes the session requests of one engine.

    Invariant: each request gets exactly one reply, unless the engine ends.
    """

    def __init__(
        self, sessions: SessionManager, kv_cache: KvCacheManager, limits: Limits, callbacks: EngineCallbacks
    ) -> None:
        """Initialize without transfers.

        With a session store, hash the weights now, because the first `fingerprint` would delay a step.
        """
        self._sessions = sessions
        self._kv_cache = kv_cache
        self._store = limits.session_store
        self._callbacks = callbacks
        self._transfers: deque[_Transfer] = deque()
        self._replies: list[SessionReply] = []
        self._pool: ThreadPoolExecutor | None = None
        # Called on another thread when file I/O is done, so that `continue_transfer` has work.
        self.wake: Callable[[], None] = lambda: None
        self._file_spec = (
            None if self._store is None or not kv_cache.caches_prefixes else file_spec(kv_cache, limits)
        )

    @property
    def is_ready(self) -> bool:
        """True if `continue_transfer` would do something."""
        return any(transfer.work.done() for transfer in self._transfers)

    def handle(self, request: SessionRequest) -> None:
        """Execute a request or begin a transfer.

        `pop_replies` returns the reply at once, or when the transfer has ended.
        """
        try:
            sessions = self._execute(request)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            self._replies.append(SessionReply(request.call_id, [], error))
            return
        if sessions is not None:
            self._replies.append(SessionReply(request.call_id, sessions))

    def continue_transfer(self) -> None:
        """Resume the longest-waiting transfer whose file I/O is done."""
        ready = next((transfer for transfer in self._transfers if transfer.work.done()), None)
        if ready is not None:
            self._transfers.remove(ready)
            self._resume(ready.call_id, ready.session, ready.steps, ready.work)

    def pop_replies(self) -> list[SessionReply]:
        """Return the replies since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Cancel all transfers and wait for file I/O in progress."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for transfer in self._transfers:
            transfer.steps.close()
        self._transfers.clear()

    # --- inside ---

    def _execute(self, request: SessionRequest) -> list[SessionInfo] | None:
        """Return the sessions to reply with, or None if a transfer has begun and replies later."""
        sessions, client_id = self._sessions, request.client_id
        match request.kind:
            case "list":
                return sessions.list_info(client_id)
            case "create":
                session = sessions.create(client_id, request.name)
            case "fork":
                source = sessions.find_ready(client_id, request.name)
                session = sessions.fork(source, request.other, request.n_tokens)
            case "trim":
                session = sessions.find_ready(client_id, request.name)
                sessions.trim(session, request.n_tokens)
            case "delete":
                session = sessions.find_ready(client_id, request.name)
                info = sessions.info(session)
                sessions.delete(session)
                return [info]
            case "save":
                path, spec = self._path(request)
                session = sessions.find_ready(client_id, request.name)
                self._begin(request, session, self._save(session, path, spec))
                return None
            case "restore":
                path, spec = self._path(request)
                session = sessions.create(client_id, request.name)
                self._callbacks.begin_restore(session)
                self._begin(request, session, self._restore(session, request.cache_salt, path, spec))
                return None
        return [sessions.info(session)]

    def _path(self, request: SessionRequest) -> tuple[Path, SessionFileSpec]:
        """Return the path and the spec of a file. Each client has its own folder, which no name can leave."""
        if self._store is None or self._file_spec is None:
            raise UnsupportedError(
                f"{request.kind} needs the prefix cache and a session_store; set one with --session-store",
                param="session_store",
            )
        check_name(request.other, "file")
        folder = hashlib.blake2b(
            request.client_id.encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()
        return self._store / folder / f"{request.other}{SUFFIX}", self._file_spec

    def _begin(self, request: SessionRequest, session: Session, steps: _Steps) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "llaisys-sessions")
        self._resume(request.call_id, session, steps, None)

    def _resume(self, call_id: int, session: Session, steps: _Steps, done: Future[Any] | None) -> None:
        """Pass the result of file I/O to a transfer, which starts more I/O or ends."""
        assert self._pool is not None
        try:
            error = None if done is None else done.exception()
            if error is not None:
                work = steps.throw(error)
            else:
                work = steps.send(None if done is None else done.result())
        except StopIteration:
            self._replies.append(SessionReply(call_id, [self._sessions.info(session)]))
        except EngineDeadError:
            raise
        except CoreFaultError as fault:  # an export has no side effects, so only this request fails
            log.warning("a request for session %r failed in the core: %s", session.key[1], fault)
            failed = RequestFailedError(f"the session's KV could not be read: {fault}")
            self._replies.append(SessionReply(call_id, [], failed))
        except LlaisysError as error:
            self._replies.append(SessionReply(call_id, [], error))
        else:
            future = self._pool.submit(work)
            self._transfers.append(_Transfer(call_id, session, steps, future))
            future.add_done_callback(lambda _: self.wake())

    def _save(self, session: Session, path: Path, spec: SessionFileSpec) -> _Steps:
        """Save the current state of the session; later changes have no effect."""
        salt, token_ids, stream = session.salt, session.token_ids, session.stream
        writer = SessionWriter(path, token_ids, spec, self._callbacks.loras.adapter_of(salt))
        try:
            state = self._kv_cache.export_state(salt, token_ids, stream)
            yield writer.open
            if spec.state_bytes:
                yield partial(writer.add_state, *(state or (0, np.empty(0, np.uint8))))
            at = 0
            while (
                data := self._kv_cache.export_cells(salt, token_ids, stream, at, spec.n_piece)
            ) is not None:
                n_positions = len(data) // spec.cell_bytes
                yield partial(writer.add, n_positions, data)
                at += n_positions
            yield writer.commit
        finally:
            writer.close()

    def _restore(self, session: Session, salt: str, path: Path, spec: SessionFileSpec) -> _Steps:
        """Restore a session. The whole file is verified, even if the KV cache has no space for more cells."""
        reader = SessionReader(path, spec)
        first_loaded, at = None, 0
        try:
            token_ids = yield reader.open
            session.salt = self._callbacks.loras.salt_of(salt, reader.adapter)
            session.token_ids = token_ids
            session.stream = self._kv_cache.match_to_load(
                session.salt, session.token_ids, self._callbacks.n_available_cells
            ).stream
            n_before, state = (yield reader.read_state) if spec.state_bytes else (0, np.empty(0, np.uint8))
            while (piece := (yield reader.next)) is not None:
                n_positions, data = piece
                if self._load(session, at, n_positions, data) and first_loaded is None:
                    first_loaded = at
                at += n_positions
            if n_before:
                ids = session.token_ids[:n_before]
                self._kv_cache.import_state(session.salt, ids, session.stream, state)
                self._sessions.pin(session)
        except LlaisysError as error:
            self._callbacks.end_restore(session, error)
            if first_loaded is not None:
                self._kv_cache.invalidate(session.salt, session.token_ids, session.stream, first_loaded)
            raise
        finally:
            reader.close()
        self._callbacks.end_restore(session, None)

    def _load(self, session: Session, at: int, n_positions: int, data: NDArray[np.uint8]) -> bool:
        """Cache and pin the next positions. Return False if they do not fit."""
        kv_cache, end = self._kv_cache, at + n_positions
        salt, stream, ids = session.salt, session.stream, session.token_ids[:end]
        loaded = False
        if kv_cache.prefix_cache.match(salt, ids, end, stream).n_same < end:
            if self._callbacks.n_available_cells(stream) < n_positions:
                return False
            loaded = kv_cache.import_cells(salt, ids, stream, at, data)
        self._sessions.pin(session)
        return loaded


def file_spec(kv_cache: KvCacheManager, limits: Limits) -> SessionFileSpec:
    """Return the properties and bounds of files with K and V of this engine."""
    return SessionFileSpec(
        fingerprint=kv_cache.fingerprint(),
        vocab_size=limits.vocab_size,
        cell_bytes=limits.kv_cell_bytes,
        state_bytes=limits.state_bytes,
        n_tokens_max=limits.max_model_len,
        n_piece=max(1, PIECE_BYTES // limits.kv_cell_bytes),
        n_files_max=limits.max_sessions,
    )
