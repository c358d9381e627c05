"""SessionWriter and SessionReader: the file of a saved session, with its tokens and their cached K and V.

    magic 8 B | version u32 | header length u32 | header JSON | digest
    with recurrent layers: number of tokens before the state u32 (0: no state) | state | digest
    for each piece, in the order of positions: number of positions u32 (above 0) | K and V | digest
    0 u32 | digest                                                            and nothing after it

Numbers are little endian; K and V are the bytes of `Context.kv_node_export`, the state is that of
`Context.kv_node_export_state`. Each digest is BLAKE2b-256 over
the previous digest and everything after it, which detects damage, loss, reordering and pieces of another
file. It is not a signature: every process that may write to the session store is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import struct
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from llaisys.errors import (
    ExhaustedError,
    LlaisysError,
    NotFoundError,
    RejectedError,
    StorageError,
    StorageFullError,
    UnsupportedError,
)

MAGIC = b"LLAISKV\n"
VERSION = 2
SUFFIX = ".kv"
DIGEST_BYTES = 32
_FIXED = struct.Struct("<8sII")
_COUNT = struct.Struct("<I")
# Maximum bytes of a header: a fixed part, and a part per token.
_HEADER_BYTES, _TOKEN_BYTES = 1024, 12
# Error numbers for a full disk, an exceeded quota and a file of the largest size.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

log = logging.getLogger(__name__)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`adapter`, `adapter_name`: hash and name of the LoRA adapter that computed the KV; "": none."""

    fingerprint: str
    token_ids: list[int]
    adapter: str = ""
    adapter_name: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The hash of a LoRA adapter's contents, and its name, for messages; both are "" for none."""

    hash: str = ""
    name: str = ""


NO_ADAPTER = Adapter()
# Characters of an adapter's name that a header has.
ADAPTER_NAME_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFileSpec:
    """Properties that a file must match, and its bounds.

    - `fingerprint`: that of the context. `cell_bytes`: bytes of K and V of one token in all layers.
    - `state_bytes`: bytes of a recurrent state; 0 without recurrent layers.
    - `n_tokens_max`: tokens of a file. `n_piece`: positions of a piece. `n_files_max`: files in one folder;
      None is no limit.
    - `noun`: what a file is, for messages.
    """

    fingerprint: str
    vocab_size: int
    cell_bytes: int
    n_tokens_max: int
    n_piece: int
    n_files_max: int | None
    state_bytes: int = 0
    noun: str = "saved session"


class _Digest:
    """The chain of digests: each one covers the previous digest and the next parts of the file."""

    def __init__(self) -> None:
        self._last = b""

    def next(self, *parts: Any) -> bytes:
        digest = hashlib.blake2b(self._last, digest_size=DIGEST_BYTES)
        for part in parts:
            digest.update(part)
        self._last = digest.digest()
        return self._last


class SessionWriter:
    """Writes one file: `open`, `add_state` with recurrent layers, `add` in order, `commit`.

    The file gets its final name when it is complete.
    """

    def __init__(
        self, path: Path, token_ids: Sequence[int], spec: SessionFileSpec, adapter: Adapter = NO_ADAPTER
    ) -> None:
        self._path, self._token_ids, self._spec, self._adapter = path, token_ids, spec, adapter
        self._digest = _Digest()
        self._fd, self._temporary = -1, ""

    def open(self) -> None:
        """Open a temporary file and write the header.

        Raises ExhaustedError if the folder has `n_files_max` files. `open`, `add` and `commit` raise
        StorageError.
        """
        n_files_max = self._spec.n_files_max
        with _disk_errors(self._path, self._spec):
            folder = self._path.parent
            # Do not create parents: a session store that has disappeared must not be created again.
            folder.mkdir(mode=0o700, exist_ok=True)
            n_files = 0 if n_files_max is None else _n_files(folder)
            if n_files_max is not None and n_files >= n_files_max and not self._path.exists():
                raise ExhaustedError(
                    f"there are {n_files} saved sessions, which is the limit (max_sessions); remove one"
                )
            self._fd, self._temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
            adapter = self._adapter
            fields = _Header(self._spec.fingerprint, [*self._token_ids], adapter.hash, adapter.name)
            header = msgspec.json.encode(fields)
            self._write(_FIXED.pack(MAGIC, VERSION, len(header)), header)

    def add_state(self, n_tokens: int, state: NDArray[np.uint8]) -> None:
        """Write the recurrent state after the first `n_tokens` tokens; 0: there is none."""
        with _disk_errors(self._path, self._spec):
            self._write(_COUNT.pack(n_tokens), state)

    def add(self, n_positions: int, data: NDArray[np.uint8]) -> None:
        """Write K and V of the next positions."""
        with _disk_errors(self._path, self._spec):
            self._write(_COUNT.pack(n_positions), data)

    def commit(self) -> None:
        """Complete the file, sync it to disk, and replace a file of the same name."""
        with _disk_errors(self._path, self._spec):
            self._write(_COUNT.pack(0))
            os.fsync(self._fd)
            os.replace(self._temporary, self._path)
            self._temporary = ""
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Release all resources; remove the file unless it was committed. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # on a network disk; a committed file was synced by `commit`
                os.close(self._fd)
            self._fd = -1
        if self._temporary:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""

    def _write(self, *parts: Any) -> None:
        for part in (*parts, self._digest.next(*parts)):
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(self._fd, rest) :]


class SessionReader:
    """Reads one file: `open`, `read_state` with recurrent layers, then `next` until it returns None.

    All content is checked before use. Allocations are bounded by the file's size and `SessionFileSpec`.
    """

    def __init__(self, path: Path, spec: SessionFileSpec) -> None:
        self._path, self._spec = path, spec
        self.adapter = NO_ADAPTER  # known once the file is open
        self._digest = _Digest()
        self._fd = -1
        self._n_left = 0  # unread bytes of the file
        self._n_missing = 0  # tokens after the last piece

    def open(self) -> array[int]:
        """Return the tokens. Raises RejectedError or UnsupportedError (invalid file), or StorageError."""
        with _disk_errors(self._path, self._spec):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                self._fd = os.open(self._path, flags)
            except FileNotFoundError as error:
                text = f"there is no {self._spec.noun} {self._path.stem!r}"
                raise NotFoundError(text, param="file") from error
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                self._reject("is not a regular file")
            self._n_left = status.st_size
            return self._read_header()

    def read_state(self) -> tuple[int, NDArray[np.uint8]]:
        """Return the number of tokens before the recurrent state, and its bytes; 0: there is none.

        Raises RejectedError for a damaged file, or StorageError.
        """
        with _disk_errors(self._path, self._spec):
            count = self._read(_COUNT.size)
            (n_tokens,) = _COUNT.unpack(count)
            if n_tokens > self._n_missing:
                self._reject(f"is damaged: a state after {n_tokens} tokens, it has {self._n_missing}")
            state = self._read(self._spec.state_bytes if n_tokens else 0)
            self._check_digest(count, state)
            return n_tokens, np.frombuffer(state, np.uint8)

    def next(self) -> tuple[int, NDArray[np.uint8]] | None:
        """Return the number of positions of the next piece, and their K and V as bytes `[n]`.

        None at the end of a valid file. Raises RejectedError for a damaged file, or StorageError.
        """
        with _disk_errors(self._path, self._spec):
            count = self._read(_COUNT.size)
            (n,) = _COUNT.unpack(count)
            n_max = min(self._n_missing, self._spec.n_piece)
            if n > n_max:
                self._reject(f"is damaged: a piece has {n} positions, allowed are {n_max}")
            data = self._read(n * self._spec.cell_bytes)
            self._check_digest(count, data)
            if n:
                self._n_missing -= n
                return n, np.frombuffer(data, np.uint8)
            if self._n_left:
                self._reject(f"is damaged: {self._n_left} bytes follow its end")
            return None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self) -> array[int]:
        spec = self._spec
        fixed = self._read(_FIXED.size)
        magic, version, n_header = _FIXED.unpack(fixed)
        if magic != MAGIC:
            self._reject(f"is not a {spec.noun}")
        if version != VERSION:
            text = f"the {spec.noun} {self._path.stem!r} has format version {version}"
            raise UnsupportedError(f"{text}, this build supports version {VERSION}", param="file")
        if n_header > _HEADER_BYTES + _TOKEN_BYTES * spec.n_tokens_max:
            self._reject(f"has a header of {n_header} bytes, too long for {spec.n_tokens_max} tokens")
        raw = self._read(n_header)
        self._check_digest(fixed, raw)
        try:
            header = msgspec.json.decode(raw, type=_Header)
        except (msgspec.DecodeError, RecursionError) as error:
            self._reject(f"has a header that cannot be read: {error}")
        if header.fingerprint != spec.fingerprint:
            self._reject(
                "was saved with another model, dtype or instruction set, or with a max_model_len that "
                "chooses other LongRoPE factors"
            )
        n_tokens = len(header.token_ids)
        if n_tokens > spec.n_tokens_max:
            self._reject(f"has {n_tokens} tokens, max_model_len is {spec.n_tokens_max}")
        if n_tokens and not 0 <= min(header.token_ids) <= max(header.token_ids) < spec.vocab_size:
            self._reject(f"has token ids outside 0 to {spec.vocab_size - 1}")
        frame = _COUNT.size + DIGEST_BYTES
        n_max = n_tokens * (spec.cell_bytes + frame) + frame
        if spec.state_bytes:
            n_max += spec.state_bytes + frame
        if self._n_left > n_max:
            self._reject(f"is damaged: {self._n_left} bytes are too many for {n_tokens} tokens")
        self._n_missing = n_tokens
        self.adapter = Adapter(header.adapter, header.adapter_name)
        return array("i", header.token_ids)

    def _read(self, n_bytes: int) -> bytearray:
        """Read exactly `n_bytes` bytes. Raises RejectedError at the end of the file."""
        if n_bytes > self._n_left:
            self._reject("is damaged: it ends too early")
        data = bytearray(n_bytes)
        rest = memoryview(data)
        while rest:
            n = os.readv(self._fd, [rest])
            if not n:
                self._reject("is damaged: it ends too early")
            rest = rest[n:]
        self._n_left -= n_bytes
        return data

    def _check_digest(self, *parts: Any) -> None:
        if self._digest.next(*parts) != self._read(DIGEST_BYTES):
            self._reject("is damaged: a checksum does not match")

    def _reject(self, what: str) -> NoReturn:
        raise RejectedError(f"the {self._spec.noun} {self._path.stem!r} {what}", param="file")


def check_store(store: Path, setting: str = "session_store") -> None:
    """Create the folder of a setting unless it exists, and test that it is writable. Raises RejectedError."""
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise RejectedError(
            f"{setting}: {store} is not a writable folder ({error.strerror}); "
            f"choose another with --{setting.replace('_', '-')}",
            param=setting,
        ) from error


def _n_files(folder: Path) -> int:
    return sum(name.endswith(SUFFIX) for name in os.listdir(folder))


@contextlib.contextmanager
def _disk_errors(path: Path, spec: SessionFileSpec) -> Iterator[None]:
    """Convert an OSError to a StorageError. The path is in the log, but not in the message."""
    try:
        yield
    except LlaisysError:
        raise
    except OSError as error:
        log.error("the %s %s: %s", spec.noun, path, error.strerror)
        kind = StorageFullError if error.errno in _FULL else StorageError
        raise kind(f"the {spec.noun} {path.stem!r}: {error.strerror}") from error
