"""Writes prefixes to disk, and kills itself at one operation of the file system.

Usage: `killed_writer.py FOLDER SEEDS`. For each seed, a forked child works in `FOLDER/<seed>` until it is
killed. Prints the number of operations of a run that is not killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from fakes import core
from fakes.disk_runner import DiskRunner
from llaisys.engine.disk_cache import block_index
from llaisys.engine.sessions import transfer

OPERATIONS = ("open", "write", "fsync", "replace", "unlink", "utime", "mkdir")
BLOCK, N_BYTES = 8, 9 * 500
# Salts and prompts of all runs: some begin as others do.
PROMPTS = [
    (salt, [*range(1, 9), *range(first, first + 30)][:n])
    for salt, first, n in [("", 1, 38), ("a", 1, 38), ("", 40, 30), ("", 80, 38), ("a", 40, 24)]
]


def make_small_blocks() -> None:
    """Make blocks of 8 tokens, in pieces of 4."""
    block_index.BLOCK_TOKENS, transfer.PIECE_BYTES = BLOCK, 4 * core.CELL_BYTES


def write(folder: Path) -> None:
    """Run all prompts twice: written while idle, then at a drain; the folder holds only some of them."""
    for is_drained in (False, True):
        runner = DiskRunner(prefix_cache_dir=folder, prefix_cache_disk_bytes=N_BYTES, n_cells=96)
        for i, (salt, prompt) in enumerate(PROMPTS):
            runner.run(f"{i}", prompt, cache_salt=salt, max_tokens=1)
            if not is_drained:
                runner.write_all()
        runner.shut_down()


def count_operations(kill_at: int, rng: random.Random) -> list[int]:
    """Count operations from now on in the first item of the result; before, in or after one of them, die."""
    count, lock = [0], threading.Lock()

    def wrap(name: str) -> None:
        call = getattr(os, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            with lock:
                count[0] += 1
                dies = count[0] == kill_at
            if dies:
                if name == "write":
                    call(arguments[0], arguments[1][: rng.randint(0, len(arguments[1]))])
                elif rng.random() < 0.5:
                    call(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        setattr(os, name, counted)

    for name in OPERATIONS:
        wrap(name)
    return count


def run(folder: Path, seeds: list[int]) -> int:
    """Return the number of operations of a whole run."""
    reader, writer = os.pipe()
    n_operations = 0
    for seed in (-1, *seeds):
        rng = random.Random(seed)
        kill_at = 0 if seed < 0 else rng.randint(1, n_operations)
        pid = os.fork()
        if pid == 0:
            count = count_operations(kill_at, rng)
            write(folder / f"{seed}")
            n = count[0]
            os.write(writer, f"{n}\n".encode())
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if seed < 0:
            assert status == 0, status
            n_operations = int(os.read(reader, 32))
        else:
            # A run may have somewhat fewer operations than the counted one.
            assert status in (0, signal.SIGKILL), status
    return n_operations


if __name__ == "__main__":
    make_small_blocks()
    print(run(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2].split(",")]))
