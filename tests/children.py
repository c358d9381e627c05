"""Children of the test process, but for the servers that live as long as the session."""

from __future__ import annotations

import psutil


def engine_processes() -> list[psutil.Process]:
    """Every child that is no `llaisys serve`."""
    return [child for child in psutil.Process().children() if "serve" not in child.cmdline()]
