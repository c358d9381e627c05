"""Measure speculative decoding: pairs of engines with and without it, in alternating order.

    python benches/speculation.py [--rounds 3] [--method suffix] [--workloads copy edit chat adversarial]

Each line of `benches/results/speculation.jsonl` is one pair: a workload, a number of streams and a round.
New engines run eight chats (`speculation_prompts.py`) with up to 128 tokens each, so that no output is known
from an earlier round. The prompts are in the prefix cache, so the seconds are those of decoding. `ratio` is
the seconds without divided by the seconds with speculation. `equal`: completions with the same tokens, of
eight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llaisys import LLM, RequestOutput, SamplingParams
from peers import cpu_name
from speculation_prompts import WORKLOADS, Work

RESULTS = Path(__file__).parent / "results" / "speculation.jsonl"
STREAMS = (1, 2, 4, 8)
MAX_TOKENS = 128


class Engine:
    """One engine and the last completions of its chats."""

    def __init__(self, model: str, streams: int, speculative_config: dict[str, Any] | None) -> None:
        self._llm = LLM(
            model,
            max_num_seqs=streams,
            num_kv_cells=16 * 1024,
            max_model_len=2048,
            speculative_config=speculative_config,
        )

    def run(self, works: Sequence[Work], *, predicts: bool) -> tuple[float, list[RequestOutput]]:
        """Complete all chats; return the seconds after their prompts are computed, and the outputs."""
        chats = [[{"role": "user", "content": work.message}] for work in works]
        params = [
            SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **work.params}) for work in works
        ]
        params = params if predicts else [replace(each, prediction=None) for each in params]
        first = [replace(each, max_tokens=1, prediction=None) for each in params]
        self._llm.chat(chats, first, use_tqdm=False)
        begin_s = time.perf_counter()
        outputs = self._llm.chat(chats, params, use_tqdm=False)
        return time.perf_counter() - begin_s, outputs

    def close(self) -> None:
        self._llm.close()


def pair(model: str, workload: str, streams: int, round_: int, config: dict[str, Any]) -> dict[str, Any]:
    """Run one pair of engines; the order alternates with the round."""
    works = WORKLOADS[workload]()
    seconds: dict[bool, float] = {}
    outputs: dict[bool, list[RequestOutput]] = {}
    for speculates in (False, True) if round_ % 2 == 0 else (True, False):
        engine = Engine(model, streams, config if speculates else None)
        seconds[speculates], outputs[speculates] = engine.run(works, predicts=speculates)
        engine.close()
    ids = [[choice.token_ids for choice in output.outputs] for output in outputs[True]]
    want = [[choice.token_ids for choice in output.outputs] for output in outputs[False]]
    n_tokens = sum(len(each) for choices in want for each in choices)
    return {
        "workload": workload,
        "method": config["method"],
        "streams": streams,
        "round": round_,
        "tokens": n_tokens,
        "seconds_without": round(seconds[False], 3),
        "seconds_with": round(seconds[True], 3),
        "ratio": round(seconds[False] / seconds[True], 3),
        "equal": sum(a == b for a, b in zip(ids, want, strict=True)),
    }


def main() -> None:
    """Run all pairs and print the median ratio of each workload and number of streams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="suffix", choices=("suffix", "ngram"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    config = {"method": args.method}
    pairs = [
        {"machine": cpu_name(), **pair(args.model, workload, streams, round_, config)}
        for round_ in range(args.rounds)
        for workload in args.workloads
        for streams in args.streams
    ]
    args.output.write_text("".join(json.dumps(each) + "\n" for each in pairs), "utf-8")
    print(f"ratio of the seconds without and with {args.method}, median of {args.rounds} rounds")
    for workload in args.workloads:
        shown = ""
        for streams in args.streams:
            of = [p["ratio"] for p in pairs if (p["workload"], p["streams"]) == (workload, streams)]
            shown += f"  {streams} streams {statistics.median(of):.2f}"
        print(f"{workload:12}{shown}")
    print(f"equal completions: {sum(p['equal'] for p in pairs)} of {8 * len(pairs)}")


if __name__ == "__main__":
    main()
