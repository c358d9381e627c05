"""A fake of `_core.Watchdog`."""

from __future__ import annotations

import os
from typing import Any


class Watchdog:
    """Reports what a test sets. The newest one is `Watchdog.newest`."""

    newest: Watchdog

    def __init__(self, progress: object, **windows: float | None) -> None:
        assert progress is None
        self.windows = windows
        self.stall_reason: str | None = None
        self.reports: list[dict[str, Any]] = []
        self.n_beats = 0
        reader, writer = os.pipe()
        self._reader, self._writer = os.fdopen(reader, "rb", 0), os.fdopen(writer, "wb", 0)
        Watchdog.newest = self

    def report_stall(self, stall_reason: str) -> None:
        """Report a stall."""
        self.stall_reason = stall_reason
        self._writer.write(stall_reason[1:].encode())

    def report_late_loop(self) -> None:
        """Report a late event loop."""
        self._writer.write(b"L")

    def report(self, **numbers: Any) -> None:
        self.reports.append(numbers)

    def beat(self) -> None:
        self.n_beats += 1

    def fileno(self) -> int:
        return self._reader.fileno()

    def close(self) -> None:
        self._writer.close()
