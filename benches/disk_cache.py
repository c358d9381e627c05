"""Measure the disk tier of the prefix cache: the first token after a restart, and the cost of writing.

    python benches/disk_cache.py [--rounds 5] [--model smollm2]

Each line of `benches/results/disk-cache.jsonl` is one round of one row:

- `restart`: seconds until the first token of a prompt of 6,000 tokens, by an engine that has an empty folder
  (`seconds_cold`), and by the next engine on that folder (`seconds_disk`). `ratio` is the second divided by
  the first; the goal is at most 0.2. `cached`: prompt tokens that were loaded, of 6,000.
- `write`: seconds for 16 new prompts of 512 tokens with 64 tokens each, four at a time, by two engines that
  take turns, without and with a folder. `ratio` is the seconds with divided by those without; the goal is at
  most 1.03. `files`: blocks in the folder after the round, which shows that the work was done.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llaisys import LLM, SamplingParams
from peers import cpu_name

RESULTS = Path(__file__).parent / "results" / "disk-cache.jsonl"
N_LONG, N_SHORT, N_PROMPTS, N_TOKENS = 6_000, 512, 16, 64
N_CELLS = 16 * 1024


def prompts_of(rng: random.Random, n: int, length: int) -> list[dict[str, Any]]:
    """Return random prompts, so that none begins as another does."""
    return [{"prompt_token_ids": [rng.randrange(100, 40_000) for _ in range(length)]} for _ in range(n)]


def start(model: str, folder: Path | None) -> LLM:
    """Return an engine for four requests at a time."""
    return LLM(model, max_num_seqs=4, num_kv_cells=N_CELLS, max_model_len=8192, prefix_cache_dir=folder)


def complete(llm: LLM, prompts: list[dict[str, Any]], n_tokens: int) -> tuple[float, int]:
    """Return the seconds of these completions, and the number of cached prompt tokens of the first."""
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin_s, outputs[0].num_cached_tokens or 0


def measure_restart(model: str, n_rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one pair per round: a new prompt, computed by one engine and loaded by the next."""
    for round_ in range(n_rounds):
        (warm_up, prompt) = prompts_of(random.Random(round_), 2, N_LONG)
        warm_up["prompt_token_ids"] = warm_up["prompt_token_ids"][:N_SHORT]
        seconds, n_cached = [], 0
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                llm = start(model, Path(folder))
                complete(llm, [warm_up], 1)
                spent_s, n_cached = complete(llm, [prompt], 1)
                seconds.append(round(spent_s, 4))
                llm.close()
        cold_s, disk_s = seconds
        yield {
            "row": "restart",
            "round": round_,
            "seconds_cold": cold_s,
            "seconds_disk": disk_s,
            "ratio": round(disk_s / cold_s, 3),
            "cached": n_cached,
        }


def measure_write(model: str, n_rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one pair per round: the same new prompts, by engines that take turns."""
    with tempfile.TemporaryDirectory() as folder:
        engines = {True: start(model, Path(folder)), False: start(model, None)}
        for round_ in range(n_rounds):
            prompts = prompts_of(random.Random(1000 + round_), N_PROMPTS, N_SHORT)
            order = (False, True) if round_ % 2 == 0 else (True, False)
            seconds = {writes: round(complete(engines[writes], prompts, N_TOKENS)[0], 4) for writes in order}
            yield {
                "row": "write",
                "round": round_,
                "seconds_without": seconds[False],
                "seconds_with": seconds[True],
                "ratio": round(seconds[True] / seconds[False], 3),
                "files": len([*Path(folder).glob("*/*.kv")]),
            }
        for engine in engines.values():
            engine.close()


def main() -> None:
    """Run all pairs, write them, and print the median ratio of each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    machine = {"machine": cpu_name(), "model": args.model}
    for measure in (measure_restart, measure_write):
        pairs = [{**machine, **each} for each in measure(args.model, args.rounds)]
        with args.output.open("a", encoding="utf-8") as results:
            results.writelines(json.dumps(each) + "\n" for each in pairs)
        print(f"{pairs[0]['row']}: median ratio {statistics.median(each['ratio'] for each in pairs):.3f}")


if __name__ == "__main__":
    main()
