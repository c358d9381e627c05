"""Measure ten times the server's capacity: the time to reject a request, and the loss of throughput.

One engine thread; the client is on the other core. The capacity is measured with a closed loop that fills
every batch. Then an open Poisson loop sends ten times its requests per second. All requests are chats, with
template and text. Throughput is read from the server's token counter in a window without the beginning;
rejection times are from the server's log. Goals: rejections' p99 at most 100 ms, throughput at least 85 % of
that at capacity, no 5xx.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llaisys.bench.http_client import Target, session_of
from llaisys.bench.load_generator import Run, run_load
from llaisys.bench.workload import Workload, arrival_times
from server_process import OwnServer, on_client_core, own_server

FACTOR, N_SEQS, RAMP_S = 10, 64, 8.0
FLAGS = ("smollm2", "--num-threads", "1", "--max-num-seqs", str(N_SEQS), "--num-kv-cells", "16384")
WORKLOAD: dict[str, Any] = {"as_text": True, "input_len": 64, "output_len": 64, "range_ratio": 0.5}
FIELDS = {"ignore_eos": True, "temperature": 0}


@dataclass
class Watch:
    """Samples the server's metrics twice per second."""

    server: OwnServer
    at_s: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Sample until canceled."""
        while True:
            self.at_s.append(time.perf_counter())
            self.tokens.append(await asyncio.to_thread(self.server.metric, "vllm:generation_tokens_total"))
            self.waiting.append(await asyncio.to_thread(self.server.metric, "vllm:num_requests_waiting"))
            self.rss_bytes.append(self.server.process.memory_info().rss)
            await asyncio.sleep(0.5)

    def rate(self, from_s: float, to_s: float) -> float:
        """Return tokens per second between the first and the last sample in the window."""
        inside = [i for i, at_s in enumerate(self.at_s) if from_s <= at_s <= to_s and i < len(self.tokens)]
        first, last = inside[0], inside[-1]
        return (self.tokens[last] - self.tokens[first]) / (self.at_s[last] - self.at_s[first])


def overload(seconds: float) -> dict[str, Any]:
    """Measure `seconds` seconds at capacity, then as many at ten times the capacity."""
    with own_server(*FLAGS) as server, on_client_core():
        return asyncio.run(_overload(server, seconds))


async def _overload(server: OwnServer, seconds: float) -> dict[str, Any]:
    target = Target(base_url=server.url, backend="openai-chat", model="smollm2", fields=FIELDS)
    async with session_of(target) as session:
        probe = Workload(num_prompts=3 * N_SEQS, **WORKLOAD).draw(1)
        run = await run_load(session, target, probe, [0.0] * len(probe), N_SEQS)
        rate = len(probe) / run.duration_s

        def at_rate(rate: float, seed: int) -> tuple[Any, int]:
            n = int(rate * seconds)
            return Workload(num_prompts=n, **WORKLOAD).draw(seed), n

        watch = Watch(server)
        watching = asyncio.create_task(watch.run())
        prompts, n = at_rate(rate * 1.1, 2)  # some more, so that the load lasts
        start_s = time.perf_counter()
        capacity = await run_load(session, target, prompts, [0.0] * n, N_SEQS)
        at_capacity = watch.rate(start_s + RAMP_S, start_s + min(seconds, 0.9 * capacity.duration_s))

        prompts, n = at_rate(rate * FACTOR, 3)
        log_size, start_s = server.log.stat().st_size, time.perf_counter()
        over = await run_load(session, target, prompts, arrival_times(n, rate * FACTOR, 1.0, 3))
        admitted = watch.rate(start_s + RAMP_S, start_s + seconds)
        watching.cancel()
    refusals_ms = 1e3 * np.array(server.response_seconds(429, log_size) or [0.0])
    return {
        "capacity_requests_per_s": rate,
        "capacity_tokens_per_s": at_capacity,
        "offered_requests_per_s": rate * FACTOR,
        "admitted_tokens_per_s": admitted,
        "admitted_share": admitted / at_capacity,
        "refusals": len(refusals_ms),
        "refusal_server_p50_ms": float(np.percentile(refusals_ms, 50)),
        "refusal_server_p99_ms": float(np.percentile(refusals_ms, 99)),
        "refusal_server_max_ms": float(refusals_ms.max()),
        **_seen_by_client(over),
        "most_waiting": max(watch.waiting),
        "rss_growth_mb": (max(watch.rss_bytes) - watch.rss_bytes[0]) / 1e6,
        "client_at_capacity": capacity.overhead.report(),
        "client_overloaded": over.overhead.report(),
        "seconds": seconds,
    }


def _seen_by_client(run: Run) -> dict[str, Any]:
    refused_ms = [1e3 * r.latency_s for r in run.records if r.status == 429] or [0.0]
    return {
        "completed": sum(not r.error for r in run.records),
        "answers_5xx": sum(r.status >= 500 for r in run.records),
        "other_failures": sorted({r.error for r in run.records if r.error and r.status != 429})[:5],
        "refusal_client_p99_ms": float(np.percentile(refused_ms, 99)),
    }
