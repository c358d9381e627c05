"""How tests wait for another task: by a condition, without keeping a CPU busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PAUSE_S = 0.001


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; other tasks run meanwhile. The test's own time limit is the bound."""
    while not condition():  # noqa: ASYNC110 -- conditions are of many kinds, without an event of their own
        await asyncio.sleep(PAUSE_S)
