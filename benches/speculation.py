"""Measure speculative decoding: one engine, which completes the same chats with and without it in turns.

    python benches/speculation.py [--rounds 7] [--method suffix] [--workloads copy edit chat adversarial]

Each line of `benches/results/speculation.jsonl` is one round: a workload of eight chats
(`speculation_prompts.py`, up to 128 tokens each) at a number of streams. Speculation is switched after every
group of chats that run together, so that a change of the machine's speed meets both. It is one engine,
because two with the same settings differ by up to 8 % (5 pairs of engines without speculation: 1.03 to 1.08).
Earlier outputs are not kept, because each round has the same. The prompts are in the prefix cache, so the
seconds are those of decoding. `ratio` is the seconds without divided by the seconds with speculation.
`equal`: completions with the same tokens, of eight. Rounds of the method `none` are the control, in which
both sides are without speculation: their ratios show what the machine alone does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from llaisys import LLM, SamplingParams
from llaisys.engine.request import Request
from llaisys.engine.spec_decode import speculator
from llaisys.engine.spec_decode.speculator import Speculator
from llaisys.engine.step_speed import DecodeStep
from peers import cpu_name
from speculation_prompts import WORKLOADS, Work

RESULTS = Path(__file__).parent / "results" / "speculation.jsonl"
STREAMS = (1, 2, 4, 8)
MAX_TOKENS = 128


class SwitchedSpeculator(Speculator):
    """A speculator that proposes nothing while it is off."""

    is_on = True

    def propose(
        self, running: Sequence[Request], n_slots: int, last_step: DecodeStep | None
    ) -> dict[int, list[int]]:
        """Return the drafts of running requests, or none."""
        return super().propose(running, n_slots, last_step) if self.is_on else {}


class Engine:
    """One engine, whose speculation can be switched."""

    def __init__(self, model: str, streams: int, speculative_config: dict[str, Any]) -> None:
        self._llm = LLM(
            model,
            max_num_seqs=streams,
            num_kv_cells=16 * 1024,
            max_model_len=2048,
            speculative_config=speculative_config,
        )

    def warm_up(self, works: Sequence[Work]) -> None:
        """Compute all prompts, which stay in the prefix cache."""
        self._llm.chat(_chats(works), SamplingParams(max_tokens=1), use_tqdm=False)

    def run(self, works: Sequence[Work], *, speculates: bool) -> tuple[float, list[list[int]]]:
        """Complete chats together; return the seconds and the token ids of each."""
        SwitchedSpeculator.is_on = speculates
        greedy = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        params = [SamplingParams(**{**greedy, **work.params}) for work in works]
        params = params if speculates else [replace(each, prediction=None) for each in params]
        begin_s = time.perf_counter()
        outputs = self._llm.chat(_chats(works), params, use_tqdm=False)
        return time.perf_counter() - begin_s, [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        self._llm.close()


def _chats(works: Sequence[Work]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": work.message}] for work in works]


def measure(
    model: str, workload: str, streams: int, n_rounds: int, config: dict[str, Any], *, is_control: bool
) -> Iterator[dict[str, Any]]:
    """Yield one result per round. With `is_control` both sides are without speculation."""
    works = WORKLOADS[workload]()
    groups = [works[i : i + streams] for i in range(0, len(works), streams)]
    engine = Engine(model, streams, config)
    engine.warm_up(works)
    for round_ in range(n_rounds):
        seconds = {False: 0.0, True: 0.0}
        n_tokens = n_equal = 0
        for i, group in enumerate(groups):
            ids = {}
            for speculates in (False, True) if (round_ + i) % 2 == 0 else (True, False):
                spent_s, ids[speculates] = engine.run(group, speculates=speculates and not is_control)
                seconds[speculates] += spent_s
            n_tokens += sum(map(len, ids[False]))
            n_equal += sum(a == b for a, b in zip(ids[True], ids[False], strict=True))
        yield {
            "workload": workload,
            "method": "none" if is_control else config["method"],
            "streams": streams,
            "round": round_,
            "tokens": n_tokens,
            "seconds_without": round(seconds[False], 3),
            "seconds_with": round(seconds[True], 3),
            "ratio": round(seconds[False] / seconds[True], 3),
            "equal": n_equal,
        }
    engine.close()


def main() -> None:
    """Run all pairs and print the median ratio of each workload and number of streams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="suffix", choices=("suffix", "ngram"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    speculator.Speculator = SwitchedSpeculator  # type: ignore[misc]  # built by `make_speculator`
    config = {"method": args.method, "suffix_decoding_max_cached_requests": 0}
    machine = {"machine": cpu_name()}
    pairs = [
        {**machine, **each}
        for workload in args.workloads
        for streams in args.streams
        for is_control in (False, True)
        for each in measure(args.model, workload, streams, args.rounds, config, is_control=is_control)
    ]
    args.output.write_text("".join(json.dumps(each) + "\n" for each in pairs), "utf-8")
    print(f"ratio of the seconds without and with {args.method}, median of {args.rounds} rounds")
    for workload, method in product(args.workloads, (args.method, "none")):
        shown = ""
        for streams in args.streams:
            row = (workload, method, streams)
            of = [p["ratio"] for p in pairs if (p["workload"], p["method"], p["streams"]) == row]
            shown += f"  {streams} streams {statistics.median(of):.2f}"
        print(f"{workload:12} {method:6}{shown}")
    print(f"equal completions: {sum(p['equal'] for p in pairs)} of {8 * len(pairs)}")


if __name__ == "__main__":
    main()
