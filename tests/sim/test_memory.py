"""Memory stays flat over many requests: counted by tracemalloc, and seen in the process's resident size.

`SIM_REQUESTS=1000000 pytest tests/sim/test_memory.py` (`make soak`) runs more of them.
"""

from __future__ import annotations

import gc
import os
import random
import tracemalloc

import psutil

from fakes.asks import ask, limits
from fakes.core import SamplerSpec
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.worker import Worker
from sim.context import SimContext

N_REQUESTS = int(os.environ.get("SIM_REQUESTS", "200000"))
# What is traced: the last fifth, since tracing is slow. Before, a quarter fills what is bounded: the prefix
# cache, what it remembers of evictions, the timelines of ended requests. Half of the traced part goes by
# until all of that has been allocated anew, traced.
N_TRACED, N_WARM = N_REQUESTS // 5, N_REQUESTS // 4
# A thing of 8 bytes that stays for each request would be seen: 160,000 bytes in the traced part, and
# 1.1 MiB in the part before it. The allowances are for the prefix index, whose size varies with its tokens.
TRACED_GROWTH_MAX = 64 * 1024
RSS_GROWTH_MAX = 1024 * 1024


class Crowd:
    """Short requests in a row, sixteen open at a time; some share a prefix, some hang up."""

    def __init__(self) -> None:
        bounds = limits(max_num_seqs=16, max_num_batched_tokens=256, max_num_queued_reqs=16, n_cells=512)
        self.context = SimContext(n_cells=512, n_seq_max=16)
        worker = Worker(self.context, SamplerSpec)  # type: ignore[arg-type]
        self.engine = LLMEngine(Executor(worker), bounds, 0)
        self.rng = random.Random(0)
        self.n_submitted = self.n_open = 0

    def run(self, n_requests: int) -> None:
        """So many more requests, and all of them to their end."""
        rng, engine, now_s = self.rng, self.engine, 1000.0
        until = self.n_submitted + n_requests
        while self.n_submitted < until or self.n_open:
            while self.n_open < 16 and self.n_submitted < until:
                stem = [rng.randrange(8)] * 4
                prompt = stem + [rng.randrange(256) for _ in range(rng.randrange(1, 8))]
                name = f"{self.n_submitted}"
                engine.submit(ask(name, prompt, max_tokens=rng.randrange(1, 4)))
                self.n_submitted += 1
                self.n_open += 1
                if rng.random() < 0.1:
                    engine.cancel(name)
            self.n_open -= sum(output.finish_reason is not None for output in engine.step(now_s))
            now_s += 0.01


def test_memory_is_flat() -> None:
    crowd, process = Crowd(), psutil.Process()
    crowd.run(N_WARM)
    gc.collect()
    rss = process.memory_info().rss
    crowd.run(N_REQUESTS - N_WARM - N_TRACED)
    gc.collect()
    rss_growth = process.memory_info().rss - rss
    tracemalloc.start()
    try:
        crowd.run(N_TRACED // 2)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        crowd.run(N_TRACED - N_TRACED // 2)
        gc.collect()
        traced_growth = tracemalloc.get_traced_memory()[0] - traced
    finally:
        tracemalloc.stop()
    print(f"{crowd.n_submitted} requests: RSS {rss_growth:+} bytes, traced {traced_growth:+} bytes")
    assert crowd.n_submitted == N_REQUESTS
    assert rss_growth < RSS_GROWTH_MAX
    assert traced_growth < TRACED_GROWTH_MAX
    crowd.engine.check()
