"""The growth of memory over many short requests, in a module that a new process can import."""

from __future__ import annotations

import gc
import random
import tracemalloc

import psutil

from fakes.asks import ask, limits
from fakes.core import SamplerSpec
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.worker import Worker
from sim.context import SimContext

# Only the first requests are traced, since tracing is slow. The warm-up of each part fills what is bounded:
# the prefix cache, its record of evictions, the timelines of ended requests.
N_TRACED, N_WARM = 15_000, 5_000


class ShortRequests:
    """Runs short requests, sixteen at a time. Some share a prefix, and some are canceled."""

    def __init__(self) -> None:
        bounds = limits(max_num_seqs=16, max_num_batched_tokens=256, max_num_queued_reqs=16, n_cells=512)
        self.context = SimContext(n_cells=512, n_seq_max=16)
        worker = Worker(self.context, SamplerSpec)  # type: ignore[arg-type]
        self.engine = LLMEngine(Executor(worker), bounds, 0)
        self.rng = random.Random(0)
        self.n_submitted = self.n_open = 0

    def run(self, n_requests: int) -> None:
        """Submit `n_requests` more and run all of them to their end."""
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


def growth(n_requests: int) -> tuple[int, int]:
    """Return the growth in bytes of the traced memory and of the resident size after the warm-up."""
    tracemalloc.start()
    requests = ShortRequests()
    requests.run(N_WARM)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    requests.run(N_TRACED - N_WARM)
    gc.collect()
    traced_growth = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    process = psutil.Process()
    requests.run(N_WARM)
    gc.collect()
    rss = process.memory_info().rss
    while requests.n_submitted < n_requests:
        requests.run(min(N_WARM, n_requests - requests.n_submitted))
        gc.collect()  # the time of automatic collections does not matter
    requests.engine.check()
    return traced_growth, process.memory_info().rss - rss
