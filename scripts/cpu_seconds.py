"""Add the CPU seconds of a command and all its descendants to a number in a file: cpu_seconds.py FILE
COMMAND...

Processes that outlive their parents count too, because this process adopts them (prctl(2),
PR_SET_CHILD_SUBREAPER). Exits with the command's status.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> int:
    into, command = Path(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status = subprocess.call(command)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = float(into.read_text()) if into.exists() else 0.0
    into.write_text(f"{before + usage.ru_utime + usage.ru_stime:.0f}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
