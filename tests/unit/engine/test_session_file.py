"""The file of a saved session: a valid file is read back, and every other file is rejected."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llaisys.engine.sessions.file import (
    DIGEST_BYTES,
    MAGIC,
    VERSION,
    SessionFileSpec,
    SessionReader,
    SessionWriter,
    check_store,
)
from llaisys.errors import (
    ExhaustedError,
    LlaisysError,
    RejectedError,
    StorageError,
    StorageFullError,
    UnsupportedError,
)
from open_files import open_files

FACTS = SessionFileSpec(
    fingerprint="ab" * 16, vocab_size=100, cell_bytes=6, n_tokens_max=20, n_piece=4, n_files_max=3
)
TOKENS = [5, 99, 0, 7, 7, 3, 1]
PIECES = [(4, b"kkkkkkkkkkkkvvvvvvvvvvvv"), (2, b"KKKKKKVVVVVV")]


def write(
    path: Path, tokens: list[int] = TOKENS, pieces: Any = PIECES, facts: SessionFileSpec = FACTS
) -> None:
    writer = SessionWriter(path, tokens, facts)
    try:
        writer.open()
        for n, data in pieces:
            writer.add(n, np.frombuffer(data, np.uint8))
        writer.commit()
    finally:
        writer.close()


def read(path: Path, facts: SessionFileSpec = FACTS) -> tuple[list[int], list[tuple[int, bytes]]]:
    reader = SessionReader(path, facts)
    try:
        tokens, pieces = reader.open().tolist(), []
        while (piece := reader.next()) is not None:
            pieces.append((piece[0], piece[1].tobytes()))
        return tokens, pieces
    finally:
        reader.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "client" / "chat.kv"
    write(path)
    return path


def rejection(path: Path, raw: bytes | bytearray, facts: SessionFileSpec = FACTS) -> LlaisysError:
    path.write_bytes(raw)
    with pytest.raises((RejectedError, UnsupportedError)) as caught:
        read(path, facts)
    assert caught.value.param == "file"
    assert "'chat'" in str(caught.value)
    assert str(path.parent) not in str(caught.value), "an error shows no server path"
    assert not open_files(path.parent)
    return caught.value


@pytest.mark.parametrize(
    ("tokens", "pieces"), [(TOKENS, PIECES), (TOKENS, []), ([], []), (list(range(20)), [(1, b"123456")] * 20)]
)
def test_a_written_file_is_read_back(tmp_path: Path, tokens: list[int], pieces: Any) -> None:
    write(tmp_path / "x.kv", tokens, pieces)
    assert read(tmp_path / "x.kv") == (tokens, pieces)


def test_a_change_of_any_byte_is_detected(path: Path) -> None:
    raw = path.read_bytes()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << (at % 8)
        rejection(path, damaged)


def test_every_truncation_and_addition_is_detected(path: Path) -> None:
    raw = path.read_bytes()
    for n_bytes in range(len(raw)):
        rejection(path, raw[:n_bytes])
    assert "1 bytes follow" in str(rejection(path, raw + b"\0"))
    assert "too many" in str(rejection(path, raw + bytes(1000)))


def test_pieces_in_another_order_or_of_another_file_are_detected(tmp_path: Path, path: Path) -> None:
    one = [(2, b"111111222222"), (2, b"333333444444")]
    write(path, TOKENS, one)
    write(tmp_path / "y.kv", TOKENS[::-1], one)
    raw, other = path.read_bytes(), (tmp_path / "y.kv").read_bytes()
    n_piece, n_end = 4 + 12 + DIGEST_BYTES, 4 + DIGEST_BYTES
    head, first, second, end = (
        raw[: -n_end - 2 * n_piece],
        raw[-n_end - 2 * n_piece : -n_end - n_piece],
        raw[-n_end - n_piece : -n_end],
        raw[-n_end:],
    )
    assert "checksum" in str(rejection(path, head + second + first + end))
    assert "checksum" in str(rejection(path, head + other[len(head) :]))
    assert "checksum" in str(rejection(path, head + first + end)), "a piece is missing"


def test_a_file_of_another_model_or_version_is_rejected(path: Path) -> None:
    raw = path.read_bytes()
    foreign = SessionFileSpec(
        **{**{name: getattr(FACTS, name) for name in FACTS.__slots__}, "fingerprint": "cd" * 16}
    )
    assert "another model" in str(rejection(path, raw, foreign))
    newer = rejection(path, raw[:8] + struct.pack("<I", VERSION + 1) + raw[12:])
    assert isinstance(newer, UnsupportedError)
    assert f"version {VERSION + 1}, this build supports version {VERSION}" in str(newer)
    assert "is not a saved session" in str(rejection(path, b"GGUF" + raw[4:]))


def forged(header: Any, body: bytes = b"", n_header: int | None = None) -> bytes:
    """Return a file with valid checksums around any content."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    fixed = struct.pack("<8sII", MAGIC, VERSION, len(raw) if n_header is None else n_header)
    digest = hashlib.blake2b(fixed + raw, digest_size=DIGEST_BYTES).digest()
    return fixed + raw + digest + body


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"fingerprint": FACTS.fingerprint, "token_ids": [100]}, "outside 0 to 99"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": [-1]}, "outside 0 to 99"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": [2**63]}, "outside 0 to 99"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": [1] * 21}, "21 tokens, max_model_len is 20"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": [1.5]}, "cannot be read"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": [True]}, "cannot be read"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": None}, "cannot be read"),
        ({"fingerprint": FACTS.fingerprint, "token_ids": [], "more": 1}, "cannot be read"),
        ({"token_ids": []}, "cannot be read"),
        ([], "cannot be read"),
        (b"[" * 1000, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "cannot be read"),
        (b" " * 1265, "a header of 1265 bytes, too long for 20 tokens"),
    ],
)
def test_forged_headers_are_rejected(path: Path, header: Any, says: str) -> None:
    assert says in str(rejection(path, forged(header)))


def test_sizes_are_checked_before_anything_is_allocated(path: Path) -> None:
    good = {"fingerprint": FACTS.fingerprint, "token_ids": TOKENS}
    assert "ends too early" in str(rejection(path, forged(b"{}", n_header=1000)))
    assert "too long" in str(rejection(path, forged(b"{}", n_header=2**32 - 1)))
    for n in (5, 2**32 - 1):
        assert f"a piece has {n} positions" in str(rejection(path, forged(good, struct.pack("<I", n))))
    few = {"fingerprint": FACTS.fingerprint, "token_ids": [1, 2]}
    assert "a piece has 3 positions, allowed are 2" in str(rejection(path, forged(few, struct.pack("<I", 3))))


def test_noise_is_rejected(path: Path) -> None:
    chance = random.Random(7)
    for _ in range(500):
        raw = forged(chance.randbytes(chance.randrange(60)), chance.randbytes(chance.randrange(200)))
        rejection(path, raw if chance.random() < 0.5 else chance.randbytes(chance.randrange(100)))


def test_only_regular_files_are_read(tmp_path: Path, path: Path) -> None:
    (tmp_path / "link.kv").symlink_to(path)
    (tmp_path / "folder.kv").mkdir()
    os.mkfifo(tmp_path / "pipe.kv")
    for name in ("link", "folder", "pipe"):
        with pytest.raises((RejectedError, StorageError), match=f"'{name}'"):
            read(tmp_path / f"{name}.kv")
    with pytest.raises(RejectedError, match="there is no saved session 'nothing'"):
        read(tmp_path / "nothing.kv")


def test_a_file_gets_its_name_only_when_it_is_complete(path: Path) -> None:
    before = path.read_bytes()
    writer = SessionWriter(path, [1], FACTS)
    writer.open()
    writer.add(1, np.zeros(6, np.uint8))
    assert path.read_bytes() == before
    writer.close()
    writer.close()
    assert [each.name for each in path.parent.iterdir()] == ["chat.kv"]
    write(path, [1], [])
    assert read(path) == ([1], [])


def test_the_number_of_files_is_bounded(path: Path) -> None:
    for name in ("b", "c"):
        write(path.with_name(f"{name}.kv"))
    with pytest.raises(ExhaustedError, match="3 saved sessions"):
        write(path.with_name("d.kv"))
    write(path.with_name("c.kv"), [1], [])
    assert len([*path.parent.iterdir()]) == 3


@contextlib.contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """Limit the file size of this process, which fails like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_only_the_previous_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = path.read_bytes()
    # The header, the first piece, the second piece, the end: each write meets the limit once.
    for n_bytes in (10, 200, len(before) - 50, len(before) - 1):
        for target in (path, path.with_name("new.kv")):
            with largest_file(n_bytes), pytest.raises(StorageFullError, match="': File too large") as caught:
                write(target)
            assert str(path.parent) not in str(caught.value), "an error shows no server path"
    assert [*path.parent.iterdir()] == [path]
    assert path.read_bytes() == before
    assert not open_files(path.parent)
    assert caplog.messages.count(f"the saved session {path}: File too large") == 4


def test_a_device_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to `/dev/full` fail like writes to a full disk."""

    def full(**_: Any) -> tuple[int, str]:
        return os.open("/dev/full", os.O_WRONLY), str(tmp_path / "part")

    monkeypatch.setattr("llaisys.engine.sessions.file.tempfile.mkstemp", full)
    with pytest.raises(StorageFullError, match="'x': No space left on device"):
        write(tmp_path / "x.kv")


def test_a_session_store_that_disappeared_is_not_created_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = path.parent
    store.rename(store.with_name("elsewhere"))
    with pytest.raises(StorageError, match="'x': No such file or directory"):
        write(store / "client" / "x.kv")
    assert not store.exists()
    (store.with_name("plain")).write_text("")
    with pytest.raises(StorageError, match=r"'x': (Not a directory|File exists)"):
        write(store.with_name("plain") / "x.kv")
    assert f"the saved session {store / 'client' / 'x.kv'}: No such file or directory" in caplog.messages


def test_the_session_store_is_created_at_start(tmp_path: Path) -> None:
    store = tmp_path / "a" / "b"
    for _ in range(2):
        check_store(store)
        assert [*store.iterdir()] == []
    assert store.stat().st_mode & 0o777 == 0o700


def test_an_invalid_session_store_is_rejected_at_start(tmp_path: Path) -> None:
    plain, fifo = tmp_path / "plain", tmp_path / "fifo"
    plain.write_text("")
    os.mkfifo(fifo)
    for wrong in (plain, plain / "below", fifo, Path("/proc/self"), Path("/proc/nothing")):
        with pytest.raises(RejectedError, match=f"session_store: {wrong} is not a writable folder") as caught:
            check_store(wrong)
        assert caught.value.param == "session_store"
    with largest_file(0), pytest.raises(RejectedError, match="File too large"):
        check_store(tmp_path)
