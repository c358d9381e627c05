"""Children of the test process, but for the servers that live as long as the session."""

from __future__ import annotations

from contextlib import suppress

import psutil


def engine_processes() -> list[psutil.Process]:
    """Every child that is no `llaisys serve` and no job process."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended, and may not have been waited for
            line = " ".join(child.cmdline())
            if " serve " not in line and "job_process" not in line:
                found.append(child)
    return found
