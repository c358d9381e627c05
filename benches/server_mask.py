"""Measure the cost of a grammar per token: equal completions with and without a grammar, alternated in one
run."""

from __future__ import annotations

import statistics
from typing import Any

from llaisys.bench.http_client import Target
from llaisys.bench.serve_benchmark import ServeBenchmark
from llaisys.bench.workload import Workload
from server_process import on_client_core, own_server

ROUNDS, N_OUTPUT = 3, 96
FLAGS = ("smollm2", "--num-threads", "1", "--num-kv-cells", "8192", "--log-level", "warning")
EOS = "2"  # SmolLM2's
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# None of these completions ends before N_OUTPUT tokens.
KINDS: dict[str, dict[str, Any]] = {
    "free": {"ignore_eos": True},
    "letters": {"structured_outputs": {"regex": "[ a-z]*"}, "logit_bias": {EOS: -100}},
    "json": {"structured_outputs": {"json": {"type": "array", "items": PERSON, "minItems": 64}}},
}


def mask() -> dict[str, Any]:
    """Return the median TPOT by concurrency and kind, and the microseconds of a mask per sequence and
    step."""
    result: dict[str, Any] = {}
    with own_server(*FLAGS) as server, on_client_core():
        for concurrency in (1, 16):
            tpots: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for seed in range(ROUNDS):
                for kind, fields in KINDS.items():
                    tpots[kind].append(_tpot_ms(server.url, fields, concurrency, seed))
            medians = {kind: statistics.median(values) for kind, values in tpots.items()}
            result[f"concurrency_{concurrency}"] = {
                "tpot_ms": tpots,
                "mask_us_a_token": {
                    kind: 1e3 * (median - medians["free"]) / concurrency
                    for kind, median in medians.items()
                    if kind != "free"
                },
            }
    return result


def _tpot_ms(url: str, fields: dict[str, Any], concurrency: int, seed: int) -> float:
    bench = ServeBenchmark(
        target=Target(base_url=url, fields={"temperature": 0, **fields}),
        workload=Workload(num_prompts=max(2, concurrency), input_len=16, output_len=N_OUTPUT),
        seed=seed,
        max_concurrency=concurrency,
    )
    result, run = bench.run()
    lengths = {record.output_tokens for record in run.records}
    if lengths != {N_OUTPUT}:
        raise SystemExit(
            f"completions have {sorted(lengths)} tokens, expected {N_OUTPUT}: {result['failures']}"
        )
    return float(result["median_tpot_ms"])
