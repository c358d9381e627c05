"""SqliteFile: a SQLite file of the server, with one thread that writes and one that reads.

The event loop runs no SQL. A reader of a database in WAL mode does not wait for writers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llaisys.errors import RejectedError, StorageBusyError, StorageError, StorageFullError

# Maximum calls that wait for or run on a thread, and seconds within which a call must get the thread and its
# locks.
CALLS_MAX = 64
WAIT_S = 2.0

log = logging.getLogger("llaisys.server")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreSchema:
    """What a file stores.

    - `name`: its name in messages, such as "chat store". `param`: the setting of the file.
    - `migrations`: the SQL of each version. Opening a file runs those that it lacks, in order.
    - `on_open`: called with the connection after them.
    """

    name: str
    param: str
    migrations: Sequence[str]
    on_open: Callable[[sqlite3.Connection], object] = lambda _: None


class SqliteFile:
    """A file with a connection for writing and one for reading.

    Every call raises StorageError (the disk), StorageFullError, or StorageBusyError if another process locks
    the file for longer than WAIT_S seconds or CALLS_MAX calls wait.
    """

    def __init__(self, path: Path, schema: StoreSchema) -> None:
        """Open or create the file.

        Raises RejectedError if the file cannot be used, stores something else, or has a newer version.
        """
        try:
            self.writer = StoreThread(path, schema, _open)
            try:
                self.reader = StoreThread(path, schema, _open_reader)
            except BaseException:
                self.writer.close()
                raise
        except (sqlite3.Error, OSError) as e:
            raise RejectedError(f"{path} cannot be used as a {schema.name}: {e}", param=schema.param) from e

    def close(self) -> None:
        """Close the file after pending calls."""
        self.reader.close()
        self.writer.close()


class StoreThread:
    """A thread that owns one connection to the file. Calls wait in a bounded queue for a bounded time."""

    def __init__(
        self, path: Path, schema: StoreSchema, connect: Callable[[Path, StoreSchema], sqlite3.Connection]
    ) -> None:
        """Raises the errors of `connect`."""
        self._path = path
        self._name = schema.name
        self._slots = threading.BoundedSemaphore(CALLS_MAX)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"llaisys-{schema.param}")
        try:
            self._db = self._thread.submit(connect, path, schema).result()
            self._file = path.stat()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on the thread. Uncommitted changes are rolled back, also after an error."""
        if not self._slots.acquire(blocking=False):
            raise StorageBusyError(f"{CALLS_MAX} calls wait for the {self._name}")
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
            raise StorageBusyError(f"the {self._name} did not start this call within {WAIT_S} s")
        try:
            self._check_file()
            self._db.execute(f"PRAGMA busy_timeout = {left_ms}")
            return work(self._db)
        except (sqlite3.Error, OSError) as e:
            log.error("the %s %s: %s", self._name, self._path, e)
            raise _storage_error(self._name, e) from e
        finally:
            if self._db.in_transaction:
                self._db.rollback()

    def _check_file(self) -> None:
        """Raise OSError if the file was replaced. SQLite would write to the removed file, and lose all
        writes."""
        if not os.path.samestat(self._path.stat(), self._file):
            raise OSError("the file was replaced; restart the server")


def _storage_error(name: str, error: Exception) -> StorageError:
    """Convert by SQLite's message, because Python 3.10 does not provide its error codes."""
    text = str(error)
    if "is full" in text:
        return StorageFullError(f"the {name}: {text}")
    kind = StorageBusyError if "is locked" in text else StorageError
    return kind(f"the {name}: {text}")


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=WAIT_S)


def _open(path: Path, schema: StoreSchema) -> sqlite3.Connection:
    """Return the connection for writing, after running missing migrations."""
    db = _connect(path)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        _migrate(db, path, schema)
        schema.on_open(db)
    except BaseException:
        db.close()  # also rolls back a failed migration
        raise
    return db


def _open_reader(path: Path, schema: StoreSchema) -> sqlite3.Connection:  # noqa: ARG001 -- as `_open`
    db = _connect(path)
    db.execute("PRAGMA query_only = ON")
    return db


def _migrate(db: sqlite3.Connection, path: Path, schema: StoreSchema) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    n_versions = len(schema.migrations)
    if version > n_versions:
        raise RejectedError(
            f"{path} has {schema.name} version {version}, this LLAISYS supports {n_versions}: "
            "use a newer LLAISYS or another file",
            param=schema.param,
        )
    for number in range(version, n_versions):
        db.executescript(f"BEGIN; {schema.migrations[number]} PRAGMA user_version = {number + 1}; COMMIT;")
