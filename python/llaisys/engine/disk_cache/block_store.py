"""BlockStore: the files of blocks, in the format of saved sessions.

    key                 32 random bytes that make names keyed hashes
    lock                locked while a server uses the folder
    ab/abcd….kv         one block; its name is its key, and its modification time is its last use

The header of a block has its key in place of a fingerprint. So a block that was renamed, or is from another
folder, model or salt, is not accepted. Files get their names when they are complete and on disk. Files named
`.part` that a killed server left are removed at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.disk_cache.block_index import KEY_BYTES
from llaisys.engine.sessions.file import (
    SUFFIX,
    SessionFileSpec,
    SessionReader,
    SessionWriter,
    check_store,
)
from llaisys.errors import LlaisysError, NotFoundError, RejectedError, StorageError

log = logging.getLogger(__name__)

SETTING = "prefix_cache_dir"
# The folder of blocks whose names begin with these two digits.
_SUBFOLDER = re.compile("[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """The size of a written file in bytes, and the CPU seconds of writing it."""

    n_bytes: int
    cpu_s: float


class BlockStore:
    """The folder of one engine. `open`, then the other methods on any thread, then `close`.

    `spec`: that of every block; the fingerprint is replaced by the block's key.
    """

    def __init__(self, folder: Path, spec: SessionFileSpec) -> None:
        self._folder = folder
        self._spec = replace(spec, noun="cached block", n_files_max=None)
        self._lock = -1
        self._abandoned = threading.Event()

    @property
    def block_bytes_max(self) -> int:
        """Maximum bytes of a file: K, V and id of each token, count and digest of each piece, header."""
        n_tokens, spec = self._spec.n_tokens_max, self._spec
        return n_tokens * (spec.cell_bytes + 12) + 36 * -(-n_tokens // spec.n_piece) + 256

    def open(self) -> tuple[bytes, list[tuple[bytes, int]]]:
        """Create and lock the folder, and remove what a killed server left unfinished.

        Return the key of names, and the keys and sizes of all blocks, the least recently used first. Raises
        RejectedError if the folder is not writable, or another server uses it.
        """
        check_store(self._folder, SETTING)
        try:
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._read_or_make_secret(), self._scan()
        except BlockingIOError as error:
            self.close()
            raise RejectedError(
                f"{SETTING}: {self._folder} is used by another server or model; set another folder",
                param=SETTING,
            ) from error
        except OSError as error:
            self.close()
            raise RejectedError(
                f"{SETTING}: {self._folder} cannot be read ({error.strerror}); set another folder",
                param=SETTING,
            ) from error

    def write(
        self, key: bytes, ids: Sequence[int], pieces: Sequence[NDArray[np.uint8]], dropped: Sequence[bytes]
    ) -> WrittenBlock | None:
        """Delete the `dropped` blocks, and write a block; return None if the disk failed.

        `pieces`: K and V of consecutive positions, as bytes.
        """
        begin_s = time.thread_time()
        self.delete(dropped)
        path, spec = self._path(key), replace(self._spec, fingerprint=key.hex())
        writer = SessionWriter(path, ids, spec)
        try:
            writer.open()
            for piece in pieces:
                if self._abandoned.is_set():
                    return None
                writer.add(len(piece) // spec.cell_bytes, piece)
            writer.commit()
            return WrittenBlock(path.stat().st_size, time.thread_time() - begin_s)
        except LlaisysError as error:
            log.warning("the prefix cache cannot write to %s: %s", self._folder, error)
        except OSError as error:  # another process deleted the file at once
            log.warning("the prefix cache lost a block in %s: %s", self._folder, error.strerror)
        finally:
            writer.close()
        return None

    def read(self, key: bytes, ids: Sequence[int]) -> list[NDArray[np.uint8]] | None:
        """Return K and V of a block in pieces of consecutive positions, or None for a miss.

        A file that is damaged, or is not this block, is deleted.
        """
        path, spec = self._path(key), replace(self._spec, fingerprint=key.hex())
        reader = SessionReader(path, spec)
        pieces = []
        try:
            if reader.open() != array("i", ids):
                raise RejectedError(f"the cached block {path.stem!r} has other tokens")
            while (piece := reader.next()) is not None:
                pieces.append(piece[1])
            if sum(map(len, pieces)) != len(ids) * spec.cell_bytes:
                raise RejectedError(f"the cached block {path.stem!r} has too few positions")
        except (NotFoundError, StorageError):
            return None
        except LlaisysError as error:
            log.warning("%s; it is deleted from %s", error, self._folder)
            self.delete([key])
            return None
        finally:
            reader.close()
        return pieces

    def touch(self, keys: Sequence[bytes]) -> None:
        """Set the time of last use of a path's blocks to now; that of the first block is the latest."""
        now_ns = time.time_ns()
        for i, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(now_ns - i, now_ns - i))

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete the files of blocks, if they exist."""
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def abandon(self) -> None:
        """Make a write in progress end soon, without a file."""
        self._abandoned.set()

    def close(self) -> None:
        """Unlock the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- inside ---

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{SUFFIX}"

    def _read_or_make_secret(self) -> bytes:
        """Return the key of names; make one if there is none. Blocks of a lost key are never found again."""
        path = self._folder / "key"
        with contextlib.suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == KEY_BYTES:
                return secret
        secret, temporary = secrets.token_bytes(KEY_BYTES), self._folder / ".key.part"
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secret)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        return secret

    def _scan(self) -> list[tuple[bytes, int]]:
        found: list[tuple[int, bytes, int]] = []
        for folder in [each for each in os.scandir(self._folder) if _SUBFOLDER.fullmatch(each.name)]:
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in [*os.scandir(folder)]:
                key = _key_of(entry.name)
                if not entry.is_file(follow_symlinks=False):
                    continue
                if key is not None and self._path(key) == Path(entry.path):
                    status = entry.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, key, status.st_size))
                elif entry.name.startswith(".") and entry.name.endswith(".part"):
                    os.unlink(entry.path)
        return [(key, size) for _, key, size in sorted(found)]


def _key_of(name: str) -> bytes | None:
    """Return the key of a block from the name of its file; None for another file."""
    if len(name) != 2 * KEY_BYTES + len(SUFFIX) or not name.endswith(SUFFIX):
        return None
    with contextlib.suppress(ValueError):
        return bytes.fromhex(name.removesuffix(SUFFIX))
    return None
