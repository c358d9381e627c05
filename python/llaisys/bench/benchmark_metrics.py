"""Computes metrics from request records, with the definitions and JSON keys of `vllm bench serve`.

TTFT: from sending to the first text. TPOT: (end - first) / (output tokens - 1), for completions of at least
two tokens. ITL: gaps between chunks over all completions. E2EL: from sending to the end. Percentiles
interpolate linearly (numpy). Failed requests count as failed only. Goodput: completions within every
objective, per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llaisys.bench.request_record import RequestRecord

GOODPUT_METRICS: Mapping[str, Callable[[RequestRecord], float]] = {
    "ttft": lambda r: r.ttft_s,
    "tpot": lambda r: r.tpot_s,
    "e2el": lambda r: r.latency_s,
}
# Name in JSON keys -> values in seconds.
METRICS: Mapping[str, Callable[[Sequence[RequestRecord]], list[float]]] = {
    "ttft": lambda done: [r.ttft_s for r in done],
    "tpot": lambda done: [r.tpot_s for r in done if r.output_tokens > 1],
    "itl": lambda done: [gap for r in done for gap in r.itls_s],
    "e2el": lambda done: [r.latency_s for r in done],
    "client_queue_time": lambda done: [r.queue_s for r in done],
}


def compute_metrics(
    records: Sequence[RequestRecord],
    duration_s: float,
    percentiles: Sequence[float],
    objectives_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return the metrics of a run. `objectives_ms`: `ttft`, `tpot`, `e2el` -> the most milliseconds."""
    done = [r for r in records if not r.error]
    n_input, n_output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    n_good = sum(_is_good(r, objectives_ms) for r in done)
    result = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": n_good / duration_s if objectives_ms else None,
        "output_throughput": n_output / duration_s,
        "total_token_throughput": (n_input + n_output) / duration_s,
        "max_output_tokens_per_s": max(output_rate(done), default=0.0),
        "max_concurrent_requests": _peak_concurrency(done),
        "cached_input_tokens": sum(r.cached_tokens for r in done),
        "text_chunks": sum(len(r.chunk_times_s) for r in done),
        "failures": dict(Counter(r.error for r in records if r.error).most_common(10)),
    }
    for name, values_of in METRICS.items():
        result |= _summary(name, values_of(done), percentiles)
    return result


def request_details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return a list for each metric, with one entry per request in the order of sending."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itls_s for r in records],
        "latencies": [r.latency_s for r in records],
        "start_times": [r.start_s for r in records],
        "queue_times": [r.queue_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def output_rate(done: Sequence[RequestRecord]) -> list[float]:
    """Return the output tokens of each second since the first request.

    The tokens of a completion are distributed evenly over its chunks.
    """
    if not done:
        return []
    start_s = min(r.start_s for r in done)
    rate = [0.0] * (int(max(r.end_s for r in done) - start_s) + 1)
    for r in done:
        times = r.chunk_times_s or [r.end_s]
        for at_s in times:
            rate[int(at_s - start_s)] += r.output_tokens / len(times)
    return rate


def percentile_key(percentile: float) -> str:
    """Return the key of a percentile, such as `p99` or `p99.9`."""
    return f"p{percentile:g}"


def summary_ms(values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return `mean`, `median`, `std` (population) and `pN` in milliseconds; all 0 without values."""
    values = np.array(values_s or [0.0]) * 1e3
    stats = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    stats |= {percentile_key(p): np.percentile(values, p) for p in percentiles}
    return {name: float(value) for name, value in stats.items()}


def _summary(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    return {f"{stat}_{name}_ms": value for stat, value in summary_ms(values_s, percentiles).items()}


def _is_good(record: RequestRecord, objectives_ms: Mapping[str, float]) -> bool:
    return all(1e3 * GOODPUT_METRICS[name](record) <= most for name, most in objectives_ms.items())


def _peak_concurrency(done: Sequence[RequestRecord]) -> int:
    """Return the most concurrent requests; one that ends when another starts does not overlap it."""
    changes = sorted([(r.start_s, 1) for r in done] + [(r.end_s, -1) for r in done])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
