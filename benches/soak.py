"""Send mixed traffic and faults to a real server for a long time, to detect growth of memory, files or
threads.

usage: soak.py [--minutes 30] [--seed N]

Many clients send traffic in rounds. Between rounds the server becomes idle, and its memory, open files and
threads are read, including those of its children. The warm-up fills everything that is bounded: KV cells,
grammars, the tokenizer's cache, thread pools, and the registry of ended requests. It lasts for a sixth of the
time, at least two minutes. Goals after it: memory at the end within 2 MB of memory after the warm-up, no more
files and threads, no unexpected response. Writes one line per round and a summary to
benches/results/soak-server.jsonl; the exit code is 0 if all goals are met.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from llaisys.bench.http_client import KEEP_IDLE_S
from peers import cpu_name
from server_process import OwnServer, own_server
from soak_traffic import BUSY, N_GRAMMARS, Visitor, available, bad, burst, grammar, structured

OUT = Path(__file__).parent / "results" / "soak-server.jsonl"
N_VISITORS, ROUND_S, REST_S = (
    16,
    20.0,
    6.0,
)  # at rest for longer than until the next trim (server/lifecycle.py)
DRIFT_MAX_BYTES = 2_000_000
N_CELLS, PROMPT = 4096, 500
FLAGS = (
    *("smollm2", "--num-kv-cells", str(N_CELLS), "--max-num-seqs", "8", "--max-num-queued-reqs", "12"),
    *("--request-timeout-s", "5", "--log-level", "warning"),
)


@dataclass
class Soak:
    """The state of a run: idle samples, counts of actions, counts of errors."""

    server: OwnServer
    seed: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float) -> dict[str, Any]:
        """Run the soak; return the summary."""
        warm_up_s = max(120.0, seconds / 6)
        start_s, n_warm = time.monotonic(), 0
        asyncio.run(self._with_session(self._fill_caches))
        for i in itertools.count():
            asyncio.run(self._with_session(lambda session, i=i: self._round(session, i)))
            sample = self._at_rest(time.monotonic() - start_s)
            self.samples.append(sample)
            n_warm += sample["at_s"] < warm_up_s
            print(json.dumps(sample), flush=True)
            if sample["at_s"] > seconds and len(self.samples) >= n_warm + 6:
                return self._summary(self.samples[n_warm:])
        raise AssertionError

    async def _with_session(self, work: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
        """Use new connections and close them afterwards, so that the idle server has none."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await work(session)

    async def _fill_caches(self, session: aiohttp.ClientSession) -> None:
        """Fill all caches: KV cells, grammars (1,200 reach a steady state), and more words than the tokenizer
        caches, in prompts that are too long to run."""
        visitor = Visitor(session, random.Random(self.seed), self.server.url, "filler")
        for _ in range(2 * N_CELLS // PROMPT):
            ids = visitor.rng.choices(range(1000, 40_000), k=PROMPT)
            await visitor.post("/v1/completions", BUSY, {"prompt": ids, "max_tokens": 1})
        for i in range(4 * N_GRAMMARS):
            body = {"prompt": "a", "max_tokens": 1, **grammar(i % N_GRAMMARS)}
            await visitor.post("/v1/completions", BUSY, body)
        crowd = [
            Visitor(session, random.Random(f"{self.seed} {k}"), self.server.url, "crowd")
            for k in range(N_VISITORS)
        ]
        for _ in range(3):  # more concurrent requests than any round: connections, threads and their memory
            await asyncio.gather(*map(burst, crowd), *map(bad, crowd), *map(structured, crowd))
        for _ in range(12):
            words = ("".join(visitor.rng.choices(string.ascii_lowercase, k=9)) for _ in range(2000))
            await visitor.post("/v1/completions", (400,), {"prompt": " ".join(words)})

    async def _round(self, session: aiohttp.ClientSession, i: int) -> None:
        rngs = [random.Random(f"{self.seed} {i} {k}") for k in range(N_VISITORS)]
        visitors = [Visitor(session, rng, self.server.url, f"{k}") for k, rng in enumerate(rngs)]
        actions = await available(visitors[0])
        end_s = time.monotonic() + ROUND_S

        async def visit(visitor: Visitor) -> None:
            while time.monotonic() < end_s:
                (action,) = visitor.rng.choices(*zip(*actions, strict=True))
                try:
                    await action(visitor)
                    self.done[action.__name__] += 1
                except (AssertionError, aiohttp.ClientError, asyncio.TimeoutError, ValueError) as e:
                    self.wrong[f"{action.__name__}: {type(e).__name__}: {e}"[:300]] += 1

        await asyncio.gather(*map(visit, visitors))

    def _at_rest(self, at_s: float) -> dict[str, Any]:
        """Wait until nothing runs or waits; return the sums over the server's processes."""
        while any(self.server.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting")):
            time.sleep(0.1)
        time.sleep(REST_S)
        tree = [self.server.process, *self.server.process.children(recursive=True)]
        return {
            "at_s": round(at_s, 1),
            "rss": sum(process.memory_info().rss for process in tree),
            "fds": sum(process.num_fds() for process in tree),
            "threads": sum(process.num_threads() for process in tree),
            "processes": len(tree),
            "ended": self._ended(),
            "cached_cells": self.server.metric("llaisys:kv_cells_retained"),
            "answers_429": self.server.metric("llaisys:rejected_total", "server_overloaded"),
            "actions": sum(self.done.values()),
            "wrong": sum(self.wrong.values()),
        }

    def _ended(self) -> float:
        """Return the number of ended requests."""
        return self.server.metric("vllm:request_success_total")

    def _summary(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        first, last = samples[:3], samples[-3:]

        def change(name: str) -> float:
            return statistics.median(s[name] for s in last) - statistics.median(s[name] for s in first)

        drift = change("rss")
        return {
            "seed": self.seed,
            "rounds_behind_warm_up": len(samples),
            "rss_mb": last[-1]["rss"] / 1e6,
            "rss_drift_mb": drift / 1e6,
            "rss_slope_mb_an_hour": theil_sen([s["at_s"] for s in samples], [s["rss"] for s in samples])
            * 3600
            / 1e6,
            "fds_change": change("fds"),
            "threads_change": change("threads"),
            "done": dict(self.done),
            "wrong": dict(self.wrong.most_common(10)),
            "passed": drift < DRIFT_MAX_BYTES
            and change("fds") <= 0
            and change("threads") <= 0
            and not self.wrong,
        }


def theil_sen(x: list[float], y: list[float]) -> float:
    """Return the median slope over all pairs (Theil-Sen)."""
    return float(
        np.median(
            [
                (yj - yi) / (xj - xi)
                for (xi, yi), (xj, yj) in itertools.combinations(zip(x, y, strict=True), 2)
            ]
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with own_server(*FLAGS) as server:
        soak = Soak(server, arguments.seed)
        verdict = soak.run(60 * arguments.minutes)
        alive = server.process.status() != psutil.STATUS_ZOMBIE
    verdict = {"when": when, "machine": cpu_name(), "minutes": arguments.minutes, "alive": alive, **verdict}
    print(json.dumps(verdict, indent=1))
    with OUT.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in (*soak.samples, verdict))
    return 0 if verdict["passed"] and alive else 1


if __name__ == "__main__":
    sys.exit(main())
