"""The open files of this process, to find leaks. Other threads may open and close theirs meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Return the paths of a folder that this process has open."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by another thread, or by `listdir` itself
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [target for target in targets if target.startswith(str(folder))]
