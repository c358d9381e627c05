"""How tests wait for a condition that has no event: they check it, pause, and check it again."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator

# The longest pauses. A check of another process, such as a request for its metrics, costs that process time.
TASK_PAUSE_S, PROCESS_PAUSE_S = 0.005, 0.02
# A guard against a hang, shorter than the time limit of a test: a busy machine may take its time.
DEADLINE_S = 240.0


def _pauses(max_s: float) -> Iterator[float]:
    """Yield growing pauses of up to `max_s` seconds; raise once the deadline has passed."""
    end_s, pause_s = time.monotonic() + DEADLINE_S, 0.001
    while time.monotonic() < end_s:
        yield pause_s
        pause_s = min(2 * pause_s, max_s)
    raise AssertionError(f"the condition did not hold within {DEADLINE_S:.0f} s")


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once the condition holds. Other tasks run meanwhile."""
    for pause_s in _pauses(TASK_PAUSE_S):
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        await asyncio.sleep(pause_s)


def block_until(condition: Callable[[], bool], pause: Callable[[float], object] = time.sleep) -> None:
    """Return once the condition holds. Other threads and processes run meanwhile.

    `pause` gets seconds; a test of a browser passes one that runs the page's callbacks.
    """
    for pause_s in _pauses(PROCESS_PAUSE_S):
        if condition():
            return
        pause(pause_s)
