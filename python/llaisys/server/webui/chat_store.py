"""ChatStore: the web UI's chats in a SQLite file, as documents by owner and id, with a revision for each
change.

A deleted chat leaves a tombstone, so that other browsers see the deletion.
"""

from __future__ import annotations

import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.errors import RejectedError
from llaisys.server.http_errors import to_json
from llaisys.server.sqlite_file import SqliteFile, StoreSchema

CHATS_PER_OWNER_MAX = 100_000
CHANGES_PER_PAGE = 1_000

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

    Every call raises the errors of SqliteFile.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Open or create the file. `bytes_max`: maximum bytes of one owner's chats.

        Raises RejectedError if the file cannot be used, is not a chat store, or has a newer version.
        """
        self._bytes_max = bytes_max
        self._file = SqliteFile(path, StoreSchema("chat store", "chat_store", MIGRATIONS, _set_name))
        self.name: str = self._file.writer.run_blocking(_name)

    async def changes(self, owner: str, since: int) -> list[Change]:
        """Return changes after revision `since`, oldest first, up to CHANGES_PER_PAGE."""
        return await self._file.reader.run(lambda db: _changes(db, owner, since))

    async def get(self, owner: str, chat_id: str) -> tuple[int, str] | None:
        """Return revision and JSON text of a chat; None if there is none."""
        return await self._file.reader.run(lambda db: _get(db, owner, chat_id))

    async def put(self, owner: str, chat_id: str, base: int, chat: Any) -> int | Conflict:
        """Write a chat that is at revision `base` (0: a new chat). Return its new revision, or Conflict.

        Raises RejectedError if the owner has too many chats or bytes.
        """
        bytes_max = self._bytes_max
        return await self._file.writer.run(
            lambda db: _write(db, owner, chat_id, base, _text(chat), bytes_max)
        )

    async def delete(self, owner: str, chat_id: str, base: int) -> int | Conflict:
        """Replace a chat that is at revision `base` with a tombstone. Return the new revision, or
        Conflict."""
        bytes_max = self._bytes_max
        return await self._file.writer.run(lambda db: _write(db, owner, chat_id, base, None, bytes_max))

    def close(self) -> None:
        """Close the store after pending calls."""
        self._file.close()


def _set_name(db: sqlite3.Connection) -> None:
    db.execute("INSERT OR IGNORE INTO meta VALUES ('name', ?)", (secrets.token_hex(8),))


def _name(db: sqlite3.Connection) -> str:
    (name,) = db.execute("SELECT value FROM meta WHERE name = 'name'").fetchone()
    return str(name)


def _text(chat: Any) -> str:
    return to_json(chat).decode("utf-8")


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
