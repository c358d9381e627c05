"""Children of the test process, but for the servers that live as long as the session."""

from __future__ import annotations

import psutil


def engine_processes() -> list[psutil.Process]:
    """Every child that is no `llaisys serve` and no text process."""
    children = [(child, " ".join(child.cmdline())) for child in psutil.Process().children()]
    return [child for child, line in children if " serve " not in line and "text.child" not in line]
