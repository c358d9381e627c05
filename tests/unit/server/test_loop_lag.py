"""What holds the event loop up is measured."""

from __future__ import annotations

import asyncio

from llaisys.server.lifecycle import measure_loop_lag


async def test_what_runs_on_the_loop_shows_as_its_lag() -> None:
    loop, seen = asyncio.get_running_loop(), asyncio.Queue[float]()
    measuring = asyncio.ensure_future(measure_loop_lag(seen.put_nowait, interval_s=0.01))
    try:
        assert await seen.get() >= 0
        until_s = loop.time() + 0.05
        while loop.time() < until_s:  # the next look is due in the middle of this
            pass
        assert await seen.get() >= 0.03
    finally:
        measuring.cancel()
