"""Measurement of delays of the event loop."""

from __future__ import annotations

import asyncio

from llaisys.server.lifecycle import measure_loop_lag


async def test_blocking_the_event_loop_is_measured_as_lag() -> None:
    loop, seen = asyncio.get_running_loop(), asyncio.Queue[float]()
    measuring = asyncio.ensure_future(measure_loop_lag(seen.put_nowait, interval_s=0.01))
    try:
        assert await seen.get() >= 0
        until_s = loop.time() + 0.05
        while loop.time() < until_s:  # the next measurement is due during this
            pass
        assert await seen.get() >= 0.03
    finally:
        measuring.cancel()
