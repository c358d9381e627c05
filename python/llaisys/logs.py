"""Logging of a process: lines are written to stderr through a bounded buffer and a thread.

So a stopped reader (a full pipe) never blocks the code that logs.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
STDOUT, STDERR = 1, 2
BUFFER_BYTES_MAX = 1 << 20
FLUSH_S = 1.0  # maximum seconds that an exit waits for the reader of stderr
REPEAT_INTERVAL_S = 60.0
REPEAT_KEYS_MAX = 256
# Loggers of messages that clients can cause without a request: one line per interval for each message.
REPEATING = ("asyncio", "uvicorn.error", "llaisys.connections")
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*(?=@)")


def without_credentials(address: str) -> str:
    """Return a URL without its user name and password."""
    return _CREDENTIALS.sub("***", address)


class LineWriter:
    """Writes lines to a file descriptor on a daemon thread.

    `write` never blocks. If the buffer is full, a line is dropped and counted; when the buffer drains, a line
    reports the number of dropped lines. A line counts until it is written to the descriptor.
    """

    def __init__(self, fd: int, bytes_max: int = BUFFER_BYTES_MAX) -> None:
        self.n_dropped = 0
        self._fd = fd
        self._bytes_max = bytes_max
        self._lines: collections.deque[bytes] = collections.deque()
        self._n_bytes = 0
        self._n_unreported = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line, or drop it if the buffer is full."""
        self.write_raw(f"{line}\n".encode("utf-8", "backslashreplace"))

    def write_raw(self, raw: bytes) -> None:
        """Queue output of another process unchanged, or drop it; it counts as one line."""
        with self._changed:
            if self._n_bytes + len(raw) > self._bytes_max:
                self.n_dropped += 1
                self._n_unreported += 1
                return
            self._lines.append(raw)
            self._n_bytes += len(raw)
            self._changed.notify_all()

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Wait up to `timeout_s` seconds until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._n_bytes, timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Stop the thread when everything is written; wait for it up to `timeout_s` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                raw = self._lines[0]
            with contextlib.suppress(OSError):  # a closed pipe or a full disk: there is nowhere to report it
                self._write_all(raw)
            with self._changed:
                self._lines.popleft()
                self._n_bytes -= len(raw)
                if not self._lines and self._n_unreported:
                    report = _dropped_line(self._n_unreported)
                    self._n_unreported = 0
                    self._lines.append(report)
                    self._n_bytes += len(report)
                self._changed.notify_all()

    def _write_all(self, raw: bytes) -> None:
        view = memoryview(raw)
        while view:
            view = view[os.write(self._fd, view) :]


def _dropped_line(n_lines: int) -> bytes:
    message = f"{n_lines} log lines were dropped: stderr was not read fast enough"
    record = logging.LogRecord("llaisys.logs", logging.WARNING, __file__, 0, message, None, None)
    return f"{logging.Formatter(FORMAT).format(record)}\n".encode()


class LineHandler(logging.Handler):
    """Formats records in the caller's thread and queues the text in a LineWriter."""

    def __init__(self, writer: LineWriter, line_format: str = FORMAT) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(line_format))
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the formatted record; called by `logging`."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 -- an invalid log record must not raise in its caller
            line = f"{record.levelname} {record.name}: a log record could not be formatted"
        self._writer.write(line)

    def flush(self) -> None:
        """Flush the writer; called by `logging.shutdown` at exit."""
        self._writer.flush()


class RepeatFilter(logging.Filter):
    """Passes a message once per interval; the next one that passes has the number of suppressed messages.

    Messages are equal if their first lines and the classes of their exceptions are equal.
    """

    def __init__(
        self, interval_s: float = REPEAT_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[tuple[str, str, object], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a message that was logged in this interval; called by `logging`."""
        text = record.getMessage()
        key = (record.name, text.partition("\n")[0], record.exc_info and record.exc_info[0])
        now_s = self._clock()
        with self._lock:
            since_s, n_suppressed = self._seen.get(key, (-self._interval_s, 0))
            if now_s - since_s < self._interval_s:
                self._seen[key] = (since_s, n_suppressed + 1)
                return False
            self._seen.pop(key, None)
            if len(self._seen) >= REPEAT_KEYS_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = (now_s, 0)
        if n_suppressed:
            record.msg = f"{text}\n({n_suppressed} more of these since the last one)"
            record.args = None
        return True


def start_log(level: str | int) -> LineWriter:
    """Send every logger of this process to stderr through one LineWriter."""
    writer = LineWriter(STDERR)
    logging.basicConfig(level=level, handlers=[LineHandler(writer)])
    for name in REPEATING:
        logging.getLogger(name).addFilter(RepeatFilter())
    return writer
