"""Carries out what clients ask of their sessions, on the engine thread; another one reads and writes files.

A save or a restore is a generator: it hands a piece of file work out, is continued when that is done, and
exports or imports the cells of one piece in between. `turn` continues one of them, so that the steps of the
engine are held up by one piece at most. Nothing is pinned for a save: it ends where the cells have been
evicted. A restored piece is pinned as part of its session, and so given up where requests need the cells.
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
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.limits import Limits
from llaisys.engine.retention import Retention
from llaisys.engine.session_file import SUFFIX, Facts, SessionReader, SessionWriter
from llaisys.engine.sessions import Session, SessionAnswer, SessionCall, Sessions, check_name
from llaisys.errors import (
    CoreFaultError,
    EngineDeadError,
    LlaisysError,
    RequestFailedError,
    UnsupportedError,
)
from llaisys.types import SessionInfo

# A piece of a file is at most so many bytes of K and V, or one position.
PIECE_BYTES = 2**22

log = logging.getLogger(__name__)

_Steps: TypeAlias = Generator[Callable[[], Any], Any, None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What it needs of the engine.

    - `n_spare`: cells of an arena that are free or can be evicted, and that no running request needs soon.
    - `begin`: requests of this session wait from now on. `end`: they go on, or end with the error.
    """

    n_spare: Callable[[int], int]
    begin: Callable[[Session], None]
    end: Callable[[Session, LlaisysError | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """A save or a restore under way: `work` is the file work that it waits for."""

    call_id: int
    session: Session
    steps: _Steps
    work: Future[Any]


class SessionCalls:
    """Owned by one engine. Invariant: each call gets one answer, unless the engine ends."""

    def __init__(self, sessions: Sessions, retention: Retention | None, limits: Limits, hooks: Hooks) -> None:
        """With a store it hashes the weights, which would hold a step up later."""
        self._sessions = sessions
        self._retention = retention
        self._store = limits.session_store
        self._hooks = hooks
        self._transfers: deque[_Transfer] = deque()
        self._answers: list[SessionAnswer] = []
        self._pool: ThreadPoolExecutor | None = None
        # Called, on another thread, when `turn` has something to do.
        self.wake: Callable[[], None] = lambda: None
        self._facts = None if retention is None or self._store is None else _facts(retention, limits)

    @property
    def is_ready(self) -> bool:
        """True if a turn would do something."""
        return any(transfer.work.done() for transfer in self._transfers)

    def call(self, call: SessionCall) -> None:
        """Carries a call out, or begins to: the answer is among `take_answers` now or after some turns."""
        try:
            shown = self._carry_out(call)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            self._answers.append(SessionAnswer(call.call_id, [], error))
            return
        if shown is not None:
            self._answers.append(SessionAnswer(call.call_id, shown))

    def turn(self) -> None:
        """Continues one transfer: the one whose turn it is of those that can go on."""
        ready = next((transfer for transfer in self._transfers if transfer.work.done()), None)
        if ready is not None:
            self._transfers.remove(ready)
            self._go_on(ready.call_id, ready.session, ready.steps, ready.work)

    def take_answers(self) -> list[SessionAnswer]:
        """What was answered since the last time."""
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """Gives up what is under way; waits for the piece of file work in progress."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for transfer in self._transfers:
            transfer.steps.close()
        self._transfers.clear()

    # --- inside ---

    def _carry_out(self, call: SessionCall) -> list[SessionInfo] | None:
        """What to answer; None: later."""
        sessions, client_id = self._sessions, call.client_id
        match call.kind:
            case "list":
                return sessions.infos(client_id)
            case "create":
                session = sessions.create(client_id, call.name)
            case "fork":
                source = sessions.settled(client_id, call.name)
                session = sessions.fork(source, call.other, call.n_tokens)
            case "trim":
                session = sessions.settled(client_id, call.name)
                sessions.trim(session, call.n_tokens)
            case "delete":
                session = sessions.settled(client_id, call.name)
                shown = sessions.info(session)
                sessions.delete(session)
                return [shown]
            case "save":
                path, facts = self._path(call)
                session = sessions.settled(client_id, call.name)
                self._begin(call, session, self._save(session, path, facts))
                return None
            case "restore":
                path, facts = self._path(call)
                session = sessions.create(client_id, call.name)
                session.salt = call.cache_salt
                self._hooks.begin(session)
                self._begin(call, session, self._restore(session, path, facts))
                return None
        return [sessions.info(session)]

    def _path(self, call: SessionCall) -> tuple[Path, Facts]:
        """A client's files are in a folder of its own; a checked name cannot lead out of it."""
        if self._store is None or self._facts is None:
            raise UnsupportedError(
                f"{call.kind} needs the setting session_store, and the prefix cache", param="session_store"
            )
        check_name(call.other, "file")
        folder = hashlib.blake2b(call.client_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return self._store / folder / f"{call.other}{SUFFIX}", self._facts

    def _begin(self, call: SessionCall, session: Session, steps: _Steps) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "llaisys-sessions")
        self._go_on(call.call_id, session, steps, None)

    def _go_on(self, call_id: int, session: Session, steps: _Steps, done: Future[Any] | None) -> None:
        """Gives a transfer what it waited for; it hands out more work, or it is over."""
        assert self._pool is not None
        try:
            error = None if done is None else done.exception()
            if error is not None:
                work = steps.throw(error)
            else:
                work = steps.send(None if done is None else done.result())
        except StopIteration:
            self._answers.append(SessionAnswer(call_id, [self._sessions.info(session)]))
        except EngineDeadError:
            raise
        except CoreFaultError as fault:  # of an export, which changes nothing: it is this call's alone
            log.warning("a call of session %r failed in the core: %s", session.key[1], fault)
            failed = RequestFailedError(f"the session's KV could not be read: {fault}")
            self._answers.append(SessionAnswer(call_id, [], failed))
        except LlaisysError as error:
            self._answers.append(SessionAnswer(call_id, [], error))
        else:
            future = self._pool.submit(work)
            self._transfers.append(_Transfer(call_id, session, steps, future))
            future.add_done_callback(lambda _: self.wake())

    def _save(self, session: Session, path: Path, facts: Facts) -> _Steps:
        """The session as it is now, however it goes on."""
        assert self._retention is not None
        salt, token_ids, stream = session.salt, session.token_ids, session.stream
        writer = SessionWriter(path, token_ids, facts)
        try:
            yield writer.open
            at = 0
            while (data := self._retention.export(salt, token_ids, stream, at, facts.n_piece)) is not None:
                n_positions = len(data) // facts.cell_bytes
                yield partial(writer.add, n_positions, data)
                at += n_positions
            yield writer.commit
        finally:
            writer.close()

    def _restore(self, session: Session, path: Path, facts: Facts) -> _Steps:
        """The whole file is checked, also where its cells find no room any more."""
        reader = SessionReader(path, facts)
        n_loaded_from, at = None, 0
        try:
            session.token_ids = yield reader.open
            session.stream = self._stream_for(session)
            while (piece := (yield reader.next)) is not None:
                n_positions, data = piece
                if self._load(session, at, n_positions, data) and n_loaded_from is None:
                    n_loaded_from = at
                at += n_positions
        except LlaisysError as error:
            self._hooks.end(session, error)
            if n_loaded_from is not None and self._retention is not None:
                self._retention.drop(session.salt, session.token_ids, session.stream, n_loaded_from)
            raise
        finally:
            reader.close()
        self._hooks.end(session, None)

    def _stream_for(self, session: Session) -> int:
        """Where most of it is cached, else where most room is."""
        assert self._retention is not None
        index, ids = self._retention.index, session.token_ids
        match = index.match(session.salt, ids, len(ids))
        streams = range(self._retention.n_streams)
        return match.stream if match.n_tokens else max(streams, key=lambda s: (self._hooks.n_spare(s), -s))

    def _load(self, session: Session, at: int, n_positions: int, data: NDArray[np.uint8]) -> bool:
        """Makes the next positions part of the prefix cache, pinned; False if there was no room for them."""
        assert self._retention is not None
        retention, end = self._retention, at + n_positions
        salt, stream, ids = session.salt, session.stream, session.token_ids[:end]
        loaded = False
        if retention.index.match(salt, ids, end, stream).n_tokens < end:
            if self._hooks.n_spare(stream) < n_positions:
                return False
            loaded = retention.load(salt, ids, stream, at, data)
        self._sessions.pin(session)
        return loaded


def _facts(retention: Retention, limits: Limits) -> Facts:
    return Facts(
        fingerprint=retention.fingerprint(),
        vocab_size=limits.vocab_size,
        cell_bytes=limits.kv_cell_bytes,
        n_tokens_max=limits.max_model_len,
        n_piece=max(1, PIECE_BYTES // limits.kv_cell_bytes),
        n_files_max=limits.max_sessions,
    )
