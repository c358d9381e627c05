"""Measure the second turn of a chat (prefix cache) and the release of cells after a cancel, on SmolLM2.

    python benches/turns.py [--rounds 5] [--cancels 200]

- Second turn: time to first token of a chat of 1,500 tokens with 20 new ones. The goal is at most 15 % of the
  same prompt's without a cached prefix.
- Reclaim: time from an abort to the release of the cells, with seven other streams. The goal is a p99 of at
  most one step and 50 ms.

Prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any

from llaisys.async_llm import AsyncLLM
from llaisys.config import load_config
from llaisys.engine.batch import Batch, StepResult
from llaisys.engine.worker import Worker
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from peers import cpu_name

N_CHAT, N_ANSWER, N_NEW, N_STREAMS = 1500, 32, 20, 8
released_s: list[float] = []
steps_ms: list[float] = []


def watch() -> None:
    """Record when the engine thread releases a sequence and its cells, and the time of each step."""
    close, run = Worker.close_sequence, Worker.execute_model

    def timed_close(self: Worker, seq_id: int) -> None:
        close(self, seq_id)
        released_s.append(time.perf_counter())

    def timed_run(self: Worker, batch: Batch) -> StepResult:
        start_s = time.perf_counter()
        result = run(self, batch)
        steps_ms.append(1e3 * (time.perf_counter() - start_s))
        return result

    Worker.close_sequence, Worker.execute_model = timed_close, timed_run  # type: ignore[method-assign]


def ids(rng: random.Random, n: int) -> list[int]:
    """Return random token ids; none is special."""
    return [rng.randrange(1000, 40_000) for _ in range(n)]


async def generate(llm: AsyncLLM, prompt: list[int], n_tokens: int, name: str) -> tuple[float, list[int]]:
    """Return the seconds to the first token, and all token ids."""
    params = SamplingParams(
        temperature=0.0, max_tokens=n_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    start_s, first_s, completion = time.perf_counter(), 0.0, []
    async for output in llm.generate(prompt, params, name):
        first_s = first_s or time.perf_counter() - start_s
        completion += output.outputs[0].token_ids
    return first_s, completion


async def second_turn(llm: AsyncLLM, n_rounds: int) -> dict[str, Any]:
    """Measure the time to first token of a chat's second turn, and of the same prompt without a cached
    prefix."""
    rng, warm, cold = random.Random(0), [], []
    for i in range(n_rounds):
        chat = ids(rng, N_CHAT - N_ANSWER)
        _, completion = await generate(llm, chat, N_ANSWER, f"first {i}")
        turn = [*chat, *completion, *ids(rng, N_NEW)]
        warm.append((await generate(llm, turn, 1, f"warm {i}"))[0])
        cold.append((await generate(llm, [*ids(rng, 1), *turn[1:]], 1, f"cold {i}"))[0])
    return {
        "bench": "second_turn",
        "tokens": N_CHAT + N_NEW,
        "new_tokens": N_NEW,
        "warm_s": [round(s, 4) for s in warm],
        "cold_s": [round(s, 4) for s in cold],
        "warm_share_of_cold": round(statistics.median(warm) / statistics.median(cold), 4),
    }


async def reclaim(llm: AsyncLLM, n_cancels: int) -> dict[str, Any]:
    """Measure the time from an abort at a random moment to the release of the sequence and its cells."""
    rng, took = random.Random(1), []
    steps_ms.clear()
    streams: list[tuple[str, asyncio.Task[Any]]] = []
    for i in range(n_cancels):
        while len(streams) < N_STREAMS:
            name = f"{i} {len(streams)}"
            streams.append(
                (name, asyncio.create_task(generate(llm, ids(rng, rng.randrange(8, 256)), 1000, name)))
            )
        await asyncio.sleep(rng.random() * 0.2)  # during its prompt or while decoding
        released_s.clear()
        start_s = time.perf_counter()
        name, task = streams.pop(rng.randrange(N_STREAMS))
        llm.abort(name)
        await task
        took.append(1e3 * (released_s[0] - start_s) if released_s else 0.0)
    for name, task in streams:
        llm.abort(name)
        await task
    took.sort()
    steps_ms.sort()
    return {
        "bench": "reclaim",
        "cancels": n_cancels,
        "median_ms": round(statistics.median(took), 1),
        "p99_ms": round(took[int(0.99 * n_cancels)], 1),
        "max_ms": round(took[-1], 1),
        "step_median_ms": round(statistics.median(steps_ms), 1),
        "step_p99_ms": round(steps_ms[int(0.99 * len(steps_ms))], 1),
    }


async def run(n_rounds: int, n_cancels: int) -> None:
    """Run both measurements on one engine."""
    watch()
    llm = await AsyncLLM.start(load_config({"model": "smollm2", "num_kv_cells": 16384}))
    try:
        for measure in (second_turn(llm, n_rounds), reclaim(llm, n_cancels)):
            print(json.dumps({"cpu": cpu_name(), **await measure}), flush=True)
    finally:
        await llm.close()


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cancels", type=int, default=200)
    flags = parser.parse_args()
    asyncio.run(run(flags.rounds, flags.cancels))


if __name__ == "__main__":
    main()
