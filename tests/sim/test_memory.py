"""Memory stays flat over many requests: counted by tracemalloc, and in the resident size of a process.

`SIM_REQUESTS=200000` (`make test-long`) and `1000000` (`make soak-sim`) run more of them.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from sim.crowd import growth

N_REQUESTS = int(os.environ.get("SIM_REQUESTS", "60000"))
# 8 bytes kept for each request are 160,000 in the traced part, and 1.2 MB of 200,000 requests in the other.
TRACED_GROWTH_MAX = 64 * 1024
RSS_GROWTH_MAX = 1024 * 1024


def test_memory_is_flat() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # nobody else's memory
        traced_growth, rss_growth = pool.submit(growth, N_REQUESTS).result()
    print(f"{N_REQUESTS} requests: RSS {rss_growth:+} bytes, traced {traced_growth:+} bytes")
    assert traced_growth < TRACED_GROWTH_MAX
    assert rss_growth < RSS_GROWTH_MAX
