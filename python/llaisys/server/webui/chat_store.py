"""ChatStore: the web UI's chats in a SQLite file, as documents by owner and id, with a revision for each
change.

The event loop runs no SQL. One thread writes and one reads, each with its own connection, because a reader of
a database in WAL mode does not wait for writers. A deleted chat leaves a tombstone, so that other browsers
see the deletion.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llaisys.errors import RejectedError, StorageBusyError, StorageError, StorageFullError
from llaisys.server.http_errors import to_json

CHATS_PER_OWNER_MAX = 100_000
CHANGES_PER_PAGE = 1_000
# Maximum calls that wait for or run on a thread, and seconds within which a call must get the thread and its
# locks.
CALLS_MAX = 64
WAIT_S = 2.0

log = logging.getLogger("llaisys.server")

# The SQL of each schema version. Opening a file runs the migrations that it lacks, in order.
MIGRATIONS = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE chats (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        revision INTEGER NOT NULL UNIQUE,
        body TEXT,
        PRIMARY KEY (owner, id)
    );
    CREATE INDEX chats_by_revision ON chats (owner, revision);
    """,
    # Only the index has the sizes, so that the sum of an owner's sizes needs no read of a chat.
    """
    ALTER TABLE chats ADD COLUMN n_bytes INTEGER NOT NULL
        GENERATED ALWAYS AS (COALESCE(LENGTH(CAST(body AS BLOB)), 0)) VIRTUAL;
    CREATE INDEX chats_by_bytes ON chats (owner, n_bytes);
    """,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """A changed chat. `deleted`: only its tombstone is left."""

    id: str
    revision: int
    deleted: bool


@dataclass(frozen=True, slots=True)
class Conflict:
    """A write had a base other than the chat's current revision `revision` (0: there is no such chat)."""

    revision: int


class ChatStore:
    """The chats of all owners. `name`: a random name stored in the file, which identifies it.

    Every call raises StorageError (the disk), StorageFullError, or StorageBusyError if another process locks
    the file for longer than WAIT_S seconds or CALLS_MAX calls wait.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Open or create the file. `bytes_max`: maximum bytes of one owner's chats.

        Raises RejectedError if the file cannot be used, is not a chat store, or has a newer version.
        """
        self._bytes_max = bytes_max
        try:
            self._writer = _Thread(path, _open)
            try:
                self.name: str = self._writer.run_blocking(_name)
                self._reader = _Thread(path, _open_reader)
            except BaseException:
                self._writer.close()
                raise
        except (sqlite3.Error, OSError) as e:
            raise RejectedError(f"{path} cannot be used as a chat store: {e}", param="chat_store") from e

    async def changes(self, owner: str, since: int) -> list[Change]:
        """Return changes after revision `since`, oldest first, up to CHANGES_PER_PAGE."""
        return await self._reader.run(lambda db: _changes(db, owner, since))

    async def get(self, owner: str, chat_id: str) -> tuple[int, str] | None:
        """Return revision and JSON text of a chat; None if there is none."""
        return await self._reader.run(lambda db: _get(db, owner, chat_id))

    async def put(self, owner: str, chat_id: str, base: int, chat: Any) -> int | Conflict:
        """Write a chat that is at revision `base` (0: a new chat). Return its new revision, or Conflict.

        Raises RejectedError if the owner has too many chats or bytes.
        """
        bytes_max = self._bytes_max
        return await self._writer.run(lambda db: _write(db, owner, chat_id, base, _text(chat), bytes_max))

    async def delete(self, owner: str, chat_id: str, base: int) -> int | Conflict:
        """Replace a chat that is at revision `base` with a tombstone. Return the new revision, or
        Conflict."""
        bytes_max = self._bytes_max
        return await self._writer.run(lambda db: _write(db, owner, chat_id, base, None, bytes_max))

    def close(self) -> None:
        """Close the store after pending calls."""
        self._reader.close()
        self._writer.close()


class _Thread:
    """A thread that owns one connection to the file. Calls wait in a bounded queue for a bounded time."""

    def __init__(self, path: Path, connect: Callable[[Path], sqlite3.Connection]) -> None:
        """Raises the errors of `connect`."""
        self._path = path
        self._slots = threading.BoundedSemaphore(CALLS_MAX)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llaisys-chats")
        try:
            self._db = self._thread.submit(connect, path).result()
            self._file = path.stat()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on the thread. Uncommitted changes are rolled back, also after an error."""
        if not self._slots.acquire(blocking=False):
            raise StorageBusyError(f"{CALLS_MAX} calls wait for the chat store")
        future = self._thread.submit(self._run_before, work, time.monotonic() + WAIT_S)
        future.add_done_callback(lambda _: self._slots.release())
        return await asyncio.wrap_future(future)

    def run_blocking(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on the thread and wait for it. Raises sqlite3.Error."""
        return self._thread.submit(work, self._db).result()

    def close(self) -> None:
        """Close the connection after waiting calls."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    def _run_before(self, work: Callable[[sqlite3.Connection], T], deadline_s: float) -> T:
        """Run `work`, and wait for locks until `deadline_s` (`time.monotonic`). Raises StorageError."""
        left_ms = int(1000 * (deadline_s - time.monotonic()))
        if left_ms <= 0:
            raise StorageBusyError(f"the chat store did not start this call within {WAIT_S} s")
        try:
            self._check_file()
            self._db.execute(f"PRAGMA busy_timeout = {left_ms}")
            return work(self._db)
        except (sqlite3.Error, OSError) as e:
            log.error("the chat store %s: %s", self._path, e)
            raise _storage_error(e) from e
        finally:
            if self._db.in_transaction:
                self._db.rollback()

    def _check_file(self) -> None:
        """Raise OSError if the file was replaced. SQLite would write to the removed file, and lose all
        writes."""
        if not os.path.samestat(self._path.stat(), self._file):
            raise OSError("the file was replaced; restart the server")


def _storage_error(error: Exception) -> StorageError:
    """Convert by SQLite's message, because Python 3.10 does not provide its error codes."""
    text = str(error)
    if "is full" in text:
        return StorageFullError(f"the chat store: {text}")
    kind = StorageBusyError if "is locked" in text else StorageError
    return kind(f"the chat store: {text}")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=WAIT_S)


def _open(path: Path) -> sqlite3.Connection:
    """Return the connection for writing, after running missing migrations."""
    db = _connect(path)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        _migrate(db, path)
    except BaseException:
        db.close()  # also rolls back a failed migration
        raise
    return db


def _open_reader(path: Path) -> sqlite3.Connection:
    db = _connect(path)
    db.execute("PRAGMA query_only = ON")
    return db


def _name(db: sqlite3.Connection) -> str:
    (name,) = db.execute("SELECT value FROM meta WHERE name = 'name'").fetchone()
    return str(name)


def _text(chat: Any) -> str:
    return to_json(chat).decode("utf-8")


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise RejectedError(
            f"{path} has chat store version {version}, this LLAISYS supports {len(MIGRATIONS)}: "
            "use a newer LLAISYS or another file",
            param="chat_store",
        )
    for number in range(version, len(MIGRATIONS)):
        db.executescript(f"BEGIN; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
    db.execute("INSERT OR IGNORE INTO meta VALUES ('name', ?)", (secrets.token_hex(8),))


def _changes(db: sqlite3.Connection, owner: str, since: int) -> list[Change]:
    rows = db.execute(
        "SELECT id, revision, body IS NULL FROM chats WHERE owner = ? AND revision > ? "
        "ORDER BY revision LIMIT ?",
        (owner, since, CHANGES_PER_PAGE),
    )
    return [Change(chat_id, revision, bool(deleted)) for chat_id, revision, deleted in rows]


def _get(db: sqlite3.Connection, owner: str, chat_id: str) -> tuple[int, str] | None:
    row = db.execute(
        "SELECT revision, body FROM chats WHERE owner = ? AND id = ? AND body IS NOT NULL", (owner, chat_id)
    ).fetchone()
    return None if row is None else (row[0], row[1])


def _write(
    db: sqlite3.Connection, owner: str, chat_id: str, base: int, body: str | None, bytes_max: int
) -> int | Conflict:
    """Compare the revision and write in one transaction, because another server may use the same file."""
    db.execute("BEGIN IMMEDIATE")
    found = db.execute(
        "SELECT revision, n_bytes FROM chats WHERE owner = ? AND id = ?", (owner, chat_id)
    ).fetchone()
    revision, n_before = found or (0, 0)
    if revision != base:
        return Conflict(revision)
    n_chats, n_bytes = db.execute(
        "SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM chats WHERE owner = ?", (owner,)
    ).fetchone()
    if found is None and n_chats >= CHATS_PER_OWNER_MAX:
        raise RejectedError(
            f"the chat store has {n_chats} chats, which is the limit; delete some", param="id"
        )
    n_more = (0 if body is None else len(body.encode("utf-8"))) - n_before
    if n_more > 0 and n_bytes + n_more > bytes_max:
        raise RejectedError(
            f"your chats would take {n_bytes + n_more} bytes of the server's store, "
            f"max_chat_bytes_per_key allows {bytes_max}: delete some",
            param="chat",
        )
    (last,) = db.execute("SELECT COALESCE(MAX(revision), 0) FROM chats").fetchone()
    db.execute(
        "INSERT OR REPLACE INTO chats (owner, id, revision, body) VALUES (?, ?, ?, ?)",
        (owner, chat_id, last + 1, body),
    )
    db.execute("COMMIT")
    return int(last) + 1
