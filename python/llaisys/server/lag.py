"""How late the event loop comes round. What runs on it for long shows here, in every answer's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.25


async def keep_measuring(observe: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
    """Tells, every `interval_s`, how many seconds after its time this woke up; endless."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due_s))
