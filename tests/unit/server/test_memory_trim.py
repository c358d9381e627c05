"""Freed memory is returned to the system."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from llaisys.server.lifecycle import trim_memory

# 100 MB in small allocations, all freed except the last one, so the C library keeps the memory below it.
FRAGMENTS = """
import ctypes, resource
from llaisys.server.lifecycle import trim

def allocated():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
pieces = [libc.malloc(1000) for _ in range(100_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 1000)
for piece in pieces[:-1]:
    libc.free(piece)
kept = allocated()
trim()
print(kept - allocated())
"""


def test_freed_memory_is_returned_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FRAGMENTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50_000_000


async def test_memory_is_trimmed_repeatedly() -> None:
    loop, again = asyncio.get_running_loop(), asyncio.Event()
    n_done = 0

    def work() -> None:
        nonlocal n_done
        n_done += 1
        if n_done == 3:
            loop.call_soon_threadsafe(again.set)

    keeper = asyncio.ensure_future(trim_memory(0.0, work))
    await again.wait()
    keeper.cancel()
