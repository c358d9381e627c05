"""The page's chats in one SQLite file: whole documents by owner and id, with a revision for each change.

One thread owns the connection; the event loop waits for it and never runs SQL itself. A deleted chat leaves a
tombstone, so that a browser that has not looked since learns of it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llaisys.errors import RejectedError

CHATS_PER_OWNER_MAX = 100_000
CHANGES_PER_PAGE = 1_000

# One entry for each schema version: what it changed. A file runs those that it lacks, in order.
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
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """A chat that changed. `deleted`: only its tombstone is left."""

    id: str
    revision: int
    deleted: bool


@dataclass(frozen=True, slots=True)
class Conflict:
    """The chat is not at the revision that a write was based on; `revision` is where it is, 0 if nowhere."""

    revision: int


class ChatStore:
    """Chats of all owners. `name` is the file's own random name: another file, another name."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file. Raises RejectedError if it is not one of ours, or of a newer version."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llaisys-chats")
        try:
            self._db, self.name = self._thread.submit(_open, path).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def changes(self, owner: str, since: int) -> list[Change]:
        """What changed after revision `since`, oldest first, CHANGES_PER_PAGE at most."""
        return await self._run(lambda db: _changes(db, owner, since))

    async def get(self, owner: str, chat_id: str) -> tuple[int, Any] | None:
        """Revision and document of a chat; None if there is none."""
        return await self._run(lambda db: _get(db, owner, chat_id))

    async def put(self, owner: str, chat_id: str, base: int, chat: Any) -> int | Conflict:
        """Writes a chat that is still at revision `base` (0: not there). The new revision, or what it met.

        Raises RejectedError for an owner with too many chats.
        """
        # In ASCII: a lone surrogate, which a JSON escape may carry in, has no UTF-8.
        body = json.dumps(chat, separators=(",", ":"))
        return await self._run(lambda db: _write(db, owner, chat_id, base, body))

    async def delete(self, owner: str, chat_id: str, base: int) -> int | Conflict:
        """Leaves a tombstone in place of a chat that is still at revision `base`."""
        return await self._run(lambda db: _write(db, owner, chat_id, base, None))

    def close(self) -> None:
        """Waits for what is being written."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._db)


def _open(path: Path) -> tuple[sqlite3.Connection, str]:
    try:
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            _migrate(db, path)
            (name,) = db.execute("SELECT value FROM meta WHERE name = 'name'").fetchone()
        except BaseException:
            db.close()  # which also undoes a migration that failed on the way
            raise
    except sqlite3.Error as e:
        raise RejectedError(f"{path} cannot be used as a chat store: {e}", param="chat_store") from e
    return db, name


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise RejectedError(
            f"{path} has chat store version {version}, this LLAISYS knows {len(MIGRATIONS)}: "
            "use a newer one, or another file",
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


def _get(db: sqlite3.Connection, owner: str, chat_id: str) -> tuple[int, Any] | None:
    row = db.execute(
        "SELECT revision, body FROM chats WHERE owner = ? AND id = ? AND body IS NOT NULL", (owner, chat_id)
    ).fetchone()
    return None if row is None else (row[0], json.loads(row[1]))


def _write(db: sqlite3.Connection, owner: str, chat_id: str, base: int, body: str | None) -> int | Conflict:
    """Compares and writes as one step: this thread alone has the connection."""
    found = db.execute("SELECT revision FROM chats WHERE owner = ? AND id = ?", (owner, chat_id)).fetchone()
    revision = 0 if found is None else found[0]
    if revision != base:
        return Conflict(revision)
    if found is None:
        (n,) = db.execute("SELECT COUNT(*) FROM chats WHERE owner = ?", (owner,)).fetchone()
        if n >= CHATS_PER_OWNER_MAX:
            raise RejectedError(f"the chat store holds {n} chats, at most {CHATS_PER_OWNER_MAX}", param="id")
    (last,) = db.execute("SELECT COALESCE(MAX(revision), 0) FROM chats").fetchone()
    db.execute("INSERT OR REPLACE INTO chats VALUES (?, ?, ?, ?)", (owner, chat_id, last + 1, body))
    return int(last) + 1
