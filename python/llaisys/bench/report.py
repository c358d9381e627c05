"""Formats benchmark results as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TITLES: Mapping[str, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
    "client_queue_time": "Client-side Queueing",
}
ROWS: tuple[tuple[str, str], ...] = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Cached input tokens", "cached_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Total text chunks", "text_chunks"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)
CLIENT_ROWS: tuple[tuple[str, str], ...] = (
    ("CPU share of one core", "cpu_share"),
    ("P99 event loop lag (ms)", "loop_lag_p99_ms"),
    ("Max event loop lag (ms)", "loop_lag_max_ms"),
    ("P99 send lag (ms)", "send_lag_p99_ms"),
)


def serve_text(result: Mapping[str, Any], metrics: list[str]) -> str:
    """Return the result of `bench serve` in vLLM's layout, followed by the client's overhead."""
    lines = [" Serving Benchmark Result ".center(60, "=")]
    lines += [_row(title, result[key]) for title, key in ROWS if result[key] is not None]
    for name in metrics:
        lines.append(f" {TITLES[name]} ".center(60, "-"))
        keys = [key for key in result if key.endswith(f"_{name}_ms")]
        lines += [
            _row(f"{key.partition('_')[0].capitalize()} {name.upper()} (ms)", result[key]) for key in keys
        ]
    lines.append(f" Client Overhead (seed {result['seed']}) ".center(60, "-"))
    lines += [_row(title, result["client"][key]) for title, key in CLIENT_ROWS]
    return "\n".join([*lines, *_warnings(result), "=" * 60])


def _row(title: str, value: float) -> str:
    return f"{title + ':':<45}{value:>15}" if isinstance(value, int) else f"{title + ':':<45}{value:>15.2f}"


def _warnings(result: Mapping[str, Any]) -> Iterator[str]:
    for error, count in result["failures"].items():
        yield f"failed {count} times: {error}"
    if result["client"]["limited"]:
        yield (
            "Warning: the client was a bottleneck, and timestamps may be late by its lag. "
            "Give it a core, or reduce the load."
        )


def write_json(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a result as JSON, or append it as a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
