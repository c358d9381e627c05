"""Logging: a reader of stderr that stops only loses lines, and lost lines are counted."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.clock import FakeClock
from llaisys.logs import LineHandler, LineWriter, RepeatFilter

PIPE_BYTES = 4096  # the smallest pipe buffer on Linux
LINE = "x" * 99  # 100 bytes with the newline


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Return (reader, writer) of a pipe that buffers one page."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    os.close(writer)


def record(name: str, message: str, error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord(name, logging.WARNING, __file__, 1, message, (), info)


def test_a_stopped_reader_loses_lines_and_gets_their_count(pipe: tuple[int, int]) -> None:
    """`write` returns although nothing is read. Later, the reader gets the buffered lines and the count."""
    reader, fd = pipe
    writer = LineWriter(fd, bytes_max=1000)
    for number in range(1000):
        writer.write(f"{number:05}{LINE[5:]}")
    writer.flush(timeout_s=0.0)
    assert 1000 - (PIPE_BYTES + 1000) // 100 <= writer.n_dropped <= 990
    raw, n_reported, numbers = b"", 0, list[int]()
    while len(numbers) + n_reported < 1000:  # if the buffer drains early, there is more than one report
        raw += os.read(reader, 65536)
        lines = raw[: raw.rfind(b"\n") + 1].decode().splitlines()
        reports = [re.search(r"WARNING llaisys\.logs (\d+) log lines were dropped", line) for line in lines]
        n_reported = sum(int(report[1]) for report in reports if report is not None)
        numbers = [int(line[:5]) for line, report in zip(lines, reports, strict=True) if report is None]
    assert numbers == sorted(numbers)
    assert (len(numbers), n_reported) == (1000 - writer.n_dropped, writer.n_dropped)
    writer.write("afterwards")
    assert os.read(reader, 100) == b"afterwards\n"
    os.close(reader)


def test_a_closed_reader_only_loses_lines(pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, fd = pipe
    os.close(reader)
    writer = LineWriter(fd)
    writer.write("not read")
    writer.flush(60)
    file = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, fd)
    os.close(file)
    writer.write("a file takes it")
    writer.flush(60)
    assert (tmp_path / "log").read_text() == "a file takes it\n"


def test_handlers_share_a_writer_and_never_raise(tmp_path: Path) -> None:
    """Lines keep their order; a record that cannot be formatted is one line; a lone surrogate is escaped."""
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    writer = LineWriter(fd)
    full, bare = LineHandler(writer, "%(levelname)s %(message)s"), LineHandler(writer, "%(message)s")
    for handler, message in ((full, "one"), (bare, '{"two": 2}'), (full, "\udc80"), (full, "%s %s")):
        each = record("a", message)
        each.args = ("too few",) if "%" in message else ()
        handler.handle(each)
    bare.flush()
    assert (tmp_path / "log").read_text().splitlines() == [
        "WARNING one",
        '{"two": 2}',
        "WARNING \\udc80",
        "WARNING a: a log record could not be formatted",
    ]
    os.close(fd)


def test_a_repeated_message_is_logged_once_per_interval(clock: FakeClock) -> None:
    """The next line has the number of suppressed ones. Another message or another error is not suppressed."""
    repeats = RepeatFilter(60.0, clock)
    full = "socket.accept() out of system resource\nsocket: <fd=%d>"
    passed = [repeats.filter(record("asyncio", full % number, OSError(24))) for number in range(1000)]
    assert passed == [True] + [False] * 999
    assert repeats.filter(record("asyncio", full % 1, ValueError()))
    assert repeats.filter(record("asyncio", "something else"))
    clock.advance(60.0)
    again = record("asyncio", full % 7, OSError(24))
    assert repeats.filter(again)
    assert again.getMessage() == full % 7 + "\n(999 more of these since the last one)"
    assert not repeats.filter(record("asyncio", full % 8, OSError(24)))


def test_remembered_messages_are_bounded(clock: FakeClock) -> None:
    repeats = RepeatFilter(60.0, clock)
    assert all(repeats.filter(record("asyncio", f"message {number}")) for number in range(10_000))
    assert len(repeats._seen) == 256
