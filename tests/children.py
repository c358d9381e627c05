"""Child processes of the test process, except the servers that live as long as the test session."""

from __future__ import annotations

from contextlib import suppress

import psutil


def engine_processes() -> list[psutil.Process]:
    """Return all children except `llaisys serve` and worker processes."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it may just have ended
            line = " ".join(child.cmdline())
            if " serve " not in line and "job_process" not in line:
                found.append(child)
    return found
