"""What was freed goes back to the system.

glibc keeps freed memory wherever a piece in use lies above it, in arenas of its many threads. Requests come
and go, grammars with tables of megabytes among them, and so a server would grow for an hour until it has seen
every mixture, though it holds no more than at first (docs/decisions/0026).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llaisys.job_process import trim

TRIM_INTERVAL_S = 5.0


async def keep_trimmed(interval_s: float = TRIM_INTERVAL_S, work: Callable[[], None] = trim) -> None:
    """Trims again and again, on a thread; endless."""
    while True:
        await asyncio.sleep(interval_s)
        await asyncio.to_thread(work)
