"""ResponseStore: responses and their input in a SQLite file, by owner and id.

A response stores its own input and the id of the previous one, so a conversation is a chain. The bounds of an
owner hold by deleting the least recently used responses; using a response uses its whole chain.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.errors import RejectedError
from llaisys.server.http_errors import to_json
from llaisys.server.request_schemas import MESSAGES_MAX
from llaisys.server.response_body import Json
from llaisys.server.sqlite_file import SqliteFile, StoreSchema

RESPONSES_PER_OWNER_MAX = 10_000

MIGRATIONS = (
    """
    CREATE TABLE responses (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        previous TEXT,
        used INTEGER NOT NULL,
        is_open INTEGER NOT NULL,
        body TEXT NOT NULL,
        input TEXT NOT NULL,
        n_bytes INTEGER NOT NULL
            GENERATED ALWAYS AS (LENGTH(CAST(body AS BLOB)) + LENGTH(CAST(input AS BLOB))) VIRTUAL,
        PRIMARY KEY (owner, id)
    );
    CREATE INDEX responses_by_use ON responses (owner, used, n_bytes);
    CREATE TABLE items (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        response TEXT NOT NULL,
        PRIMARY KEY (owner, id, response)
    );
    CREATE INDEX items_by_response ON items (owner, response);
    """,
)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with its own input. `is_open`: its generation had not ended when it was written."""

    body: Json
    input: list[Json]
    is_open: bool


class ResponseStore:
    """The responses of all owners. Every call raises the errors of SqliteFile."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Open or create the file. `bytes_max`: maximum bytes of one owner's responses.

        Raises RejectedError if the file cannot be used, is not a response store, or has a newer version.
        """
        self._bytes_max = bytes_max
        self._file = SqliteFile(path, StoreSchema("response store", "response_store", MIGRATIONS))

    async def get(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response; None if there is none."""
        return await self._file.reader.run(lambda db: _get(db, owner, id))

    async def chain(self, owner: str, id: str, bytes_max: int) -> list[StoredResponse] | None:
        """Return a response and all previous ones, oldest first; None if one of them is missing.

        Raises RejectedError if they have more than MESSAGES_MAX responses or `bytes_max` bytes.
        """
        return await self._file.reader.run(lambda db: _chain(db, owner, id, bytes_max))

    async def items(self, owner: str, ids: Sequence[str], bytes_max: int) -> Mapping[str, Json]:
        """Return the items of these ids that the owner's responses have as input or output.

        Raises RejectedError if these responses have more than `bytes_max` bytes.
        """
        return await self._file.reader.run(lambda db: _items(db, owner, ids, bytes_max))

    async def add(self, owner: str, response: StoredResponse) -> None:
        """Add a response.

        Raises RejectedError if the owner has one of the same id, or if it is larger than all may be.
        """
        bytes_max = self._bytes_max
        await self._file.writer.run(lambda db: _add(db, owner, response, bytes_max))

    async def finish(self, owner: str, body: Json) -> None:
        """Replace an open response by its final state, unless it was deleted."""
        bytes_max = self._bytes_max
        await self._file.writer.run(lambda db: _finish(db, owner, body, bytes_max))

    async def delete(self, owner: str, id: str) -> bool:
        """Delete a response; return False if there is none. Later ones of its chain cannot be continued."""
        return await self._file.writer.run(lambda db: _delete(db, owner, id))

    def close(self) -> None:
        """Close the store after pending calls."""
        self._file.close()


def _text(value: Any) -> str:
    return to_json(value).decode("utf-8")


def _get(db: sqlite3.Connection, owner: str, id: str) -> StoredResponse | None:
    row = db.execute(
        "SELECT body, input, is_open FROM responses WHERE owner = ? AND id = ?", (owner, id)
    ).fetchone()
    return None if row is None else StoredResponse(json.loads(row[0]), json.loads(row[1]), bool(row[2]))


def _chain(db: sqlite3.Connection, owner: str, id: str, bytes_max: int) -> list[StoredResponse] | None:
    found: list[StoredResponse] = []
    n_bytes = 0
    next_id: str | None = id
    while next_id is not None:
        row = db.execute(
            "SELECT n_bytes, previous FROM responses WHERE owner = ? AND id = ?", (owner, next_id)
        ).fetchone()
        stored = None if row is None else _get(db, owner, next_id)
        if stored is None:
            return None
        n_bytes += row[0]
        if n_bytes > bytes_max or len(found) >= MESSAGES_MAX:
            raise RejectedError(
                f"previous_response_id names a conversation of more than {bytes_max} bytes (max_body_bytes) "
                f"or {MESSAGES_MAX} responses; send its items as input, without the oldest",
                param="previous_response_id",
            )
        found.append(stored)
        next_id = row[1]
    return found[::-1]


def _items(db: sqlite3.Connection, owner: str, ids: Sequence[str], bytes_max: int) -> dict[str, Json]:
    wanted, found = set(ids), dict[str, Json]()
    n_bytes = 0
    for id in ids:
        if id in found:
            continue
        row = db.execute(
            "SELECT responses.id, n_bytes FROM items JOIN responses "
            "ON responses.owner = items.owner AND responses.id = response "
            "WHERE items.owner = ? AND items.id = ? LIMIT 1",
            (owner, id),
        ).fetchone()
        if row is None:
            continue
        n_bytes += row[1]
        if n_bytes > bytes_max:
            raise RejectedError(
                f"input refers to items of responses of more than {bytes_max} bytes (max_body_bytes); send "
                "the items themselves",
                param="input",
            )
        stored = _get(db, owner, row[0])
        if stored is not None:
            found |= {i["id"]: i for i in (*stored.input, *stored.body["output"]) if i["id"] in wanted}
    return found


def _add(db: sqlite3.Connection, owner: str, response: StoredResponse, bytes_max: int) -> None:
    body = response.body
    db.execute("BEGIN IMMEDIATE")
    if db.execute("SELECT 1 FROM responses WHERE owner = ? AND id = ?", (owner, body["id"])).fetchone():
        raise RejectedError(f"a response with the id {body['id']!r} is stored", param="request_id")
    used = _next_use(db, owner)
    db.execute(
        "INSERT INTO responses (owner, id, previous, used, is_open, body, input) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            owner,
            body["id"],
            body["previous_response_id"],
            used,
            response.is_open,
            _text(body),
            _text(response.input),
        ),
    )
    _add_items(db, owner, body["id"], [*response.input, *body["output"]])
    db.execute(
        "WITH RECURSIVE chain (id) AS (VALUES (?) UNION SELECT previous FROM responses JOIN chain USING (id) "
        "WHERE owner = ? AND previous IS NOT NULL) "
        "UPDATE responses SET used = ? WHERE owner = ? AND id IN (SELECT id FROM chain)",
        (body["id"], owner, used, owner),
    )
    _evict(db, owner, body["id"], bytes_max)
    db.execute("COMMIT")


def _finish(db: sqlite3.Connection, owner: str, body: Json, bytes_max: int) -> None:
    db.execute("BEGIN IMMEDIATE")
    updated = db.execute(
        "UPDATE responses SET body = ?, is_open = 0, used = ? WHERE owner = ? AND id = ?",
        (_text(body), _next_use(db, owner), owner, body["id"]),
    )
    if updated.rowcount:
        _add_items(db, owner, body["id"], body["output"])
        _evict(db, owner, body["id"], bytes_max)
    db.execute("COMMIT")


def _next_use(db: sqlite3.Connection, owner: str) -> int:
    (last,) = db.execute("SELECT COALESCE(MAX(used), 0) FROM responses WHERE owner = ?", (owner,)).fetchone()
    return int(last) + 1


def _add_items(db: sqlite3.Connection, owner: str, response_id: str, items: Sequence[Json]) -> None:
    rows = [(owner, item["id"], response_id) for item in items]
    db.executemany("INSERT OR IGNORE INTO items VALUES (?, ?, ?)", rows)


def _evict(db: sqlite3.Connection, owner: str, kept_id: str, bytes_max: int) -> None:
    """Delete the least recently used responses of an owner until its bounds hold.

    Raises RejectedError if the response `kept_id` alone exceeds them.
    """
    n_responses, n_bytes = db.execute(
        "SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM responses WHERE owner = ?", (owner,)
    ).fetchone()
    if n_responses <= RESPONSES_PER_OWNER_MAX and n_bytes <= bytes_max:
        return
    others = db.execute(
        "SELECT id, n_bytes FROM responses WHERE owner = ? AND id != ? ORDER BY used, rowid", (owner, kept_id)
    ).fetchall()
    for id, n_fewer in others:
        _remove(db, owner, id)
        n_responses, n_bytes = n_responses - 1, n_bytes - n_fewer
        if n_responses <= RESPONSES_PER_OWNER_MAX and n_bytes <= bytes_max:
            return
    raise RejectedError(
        f"the response and its input have {n_bytes} bytes, max_stored_response_bytes_per_key allows "
        f"{bytes_max}: send store: false",
        param="store",
    )


def _delete(db: sqlite3.Connection, owner: str, id: str) -> bool:
    db.execute("BEGIN IMMEDIATE")
    n_deleted = _remove(db, owner, id)
    db.execute("COMMIT")
    return bool(n_deleted)


def _remove(db: sqlite3.Connection, owner: str, id: str) -> int:
    db.execute("DELETE FROM items WHERE owner = ? AND response = ?", (owner, id))
    return db.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, id)).rowcount
