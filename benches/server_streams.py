"""Measure what HTTP adds to a step, and the delay of the event loop with many streams.

`streams` completes the same greedy prompts with `LLM.generate` and with a server, in turns: the client is on
the same machine. Its CPU time is reported apart, and so is that of the server's event loop, which varies less
than a step's time. Goal: HTTP adds at most 8 % to a step, without the client's CPU time.
`lag` sends 256 streams to a tiny model, whose steps take less time than their output. Goal: p99 of the event
loop's delay at most 20 ms. Reported apart: how long the loop's thread was ready but had no CPU, because the
client, the kernels and the engine use the same CPUs.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from llaisys import LLM, SamplingParams
from llaisys.bench.http_client import Target, send, session_of
from llaisys.bench.request_record import RequestRecord
from server_process import own_server

ROUNDS, N_STREAMS, N_OUTPUT = 7, 16, 128
SETTINGS: dict[str, Any] = {"num_kv_cells": 8192, "max_num_seqs": N_STREAMS}
FLAGS = ("--num-kv-cells", "8192", "--max-num-seqs", str(N_STREAMS), "--log-level", "warning")
TINY = Path(__file__).parents[1] / "tests" / "data" / "goldens" / "qwen2-tied-bf16"
# Of `lag`: nine rounds take about 75 s, with 300 samples of the delay.
N_MANY, N_MANY_OUTPUT, N_MANY_ROUNDS = 256, 480, 9
GREEDY = {"temperature": 0, "ignore_eos": True}
LAG = "llaisys:event_loop_lag_seconds_bucket"


def streams() -> dict[str, Any]:
    """Return the milliseconds of a step without and with HTTP, by round, and of CPU time in one."""
    prompts = _prompts(N_STREAMS)
    rounds = []
    with own_server("smollm2", *FLAGS) as server, LLM("smollm2", **SETTINGS) as llm:
        target = Target(base_url=server.url, model="smollm2", fields=GREEDY)
        for round_ in range(ROUNDS + 1):
            measured = {}
            for way in ("offline", "http") if round_ % 2 else ("http", "offline"):
                begin_s = time.perf_counter()
                if way == "http":
                    cpu_s, loop_s = time.process_time(), _scheduled_s(server.process.pid)[0]
                    asyncio.run(_send_all(target, prompts, N_OUTPUT))
                    measured["client_cpu_ms"] = 1e3 * (time.process_time() - cpu_s) / N_OUTPUT
                    loop_s = _scheduled_s(server.process.pid)[0] - loop_s
                    measured["loop_cpu_ms"] = 1e3 * float(loop_s) / N_OUTPUT
                else:
                    _generate(llm, prompts)
                measured[way] = 1e3 * (time.perf_counter() - begin_s) / N_OUTPUT
            if round_:  # the first one computes the prompts, which are cached from then on
                rounds.append(measured)
    ratios = [each["http"] / each["offline"] for each in rounds]
    own = [(each["http"] - each["client_cpu_ms"]) / each["offline"] for each in rounds]
    return {
        "rounds_ms": rounds,
        "ratio": statistics.median(ratios),
        "ratio_without_client": statistics.median(own),
        "streams": N_STREAMS,
    }


def lag() -> dict[str, Any]:
    """Return the smallest bound of the histogram that 99 % of the delays of the event loop are below."""
    settings = ("--num-kv-cells", "65536", "--max-num-seqs", str(N_MANY), "--log-level", "warning")
    with own_server(str(TINY), *settings) as server:
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        target = Target(base_url=server.url, model=model, fields=GREEDY)
        before, before_s = _lags(server.url), _scheduled_s(server.process.pid)
        begin_s = time.perf_counter()
        for _ in range(N_MANY_ROUNDS):
            asyncio.run(_send_all(target, _prompts(N_MANY, vocab_size=500), N_MANY_OUTPUT))
        seconds = time.perf_counter() - begin_s
        ran_s, waited_s = _scheduled_s(server.process.pid) - before_s
        counts = {bound: n - before[bound] for bound, n in _lags(server.url).items()}
    total = counts[float("inf")]
    p99_s = min(bound for bound, n in counts.items() if n >= 0.99 * total)
    return {
        "streams": N_MANY,
        "tokens_per_s": N_MANY * N_MANY_OUTPUT * N_MANY_ROUNDS / seconds,
        "lag_p99_at_most_ms": 1e3 * p99_s,
        "loop_ran": ran_s / seconds,
        "loop_waited_for_a_cpu": waited_s / seconds,
        "lag_counts": {str(bound): n for bound, n in counts.items()},
    }


def _scheduled_s(pid: int) -> np.ndarray:
    """Return the seconds that the main thread has run, and those that it was ready and waited for a CPU."""
    fields = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text("utf-8").split()
    return np.array([float(field) for field in fields[:2]]) / 1e9


def _prompts(n: int, vocab_size: int = 20_000) -> list[list[int]]:
    return np.random.default_rng(1).integers(100, vocab_size, (n, 16)).tolist()


def _generate(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=N_OUTPUT)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


async def _send_all(target: Target, prompts: list[list[int]], n_output: int) -> None:
    records = [RequestRecord(due_s=0.0) for _ in prompts]
    async with session_of(target) as session:
        await asyncio.gather(
            *(
                send(session, target, prompt, n_output, record)
                for prompt, record in zip(prompts, records, strict=True)
            )
        )
    errors = {record.error for record in records if record.error}
    if errors:
        raise SystemExit(f"requests failed: {errors}")


def _lags(url: str) -> dict[float, float]:
    """Return the counts of the histogram by upper bound, in seconds."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(rf'{LAG}{{[^}}]*le="([^"]+)"[^}}]*}} (\S+)', text)
    return {float(bound): float(n) for bound, n in found}
