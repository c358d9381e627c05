"""Benchmark a running server with the client of `llaisys bench serve`.

usage: server.py load|overload|health|mask|streams|lag ... [--seconds 40] [--concurrency 1 4 16] [--url URL]

- `load`: time to ready, then first token, per token and throughput by concurrency (`make bench-serve`);
  `--url` measures a server that is already running.
- `overload`, `health`, `mask`, `streams`, `lag`: see benches/server_*.py (`make bench-server`).

Each step starts its own server with SmolLM2. It appends a JSON line with the machine's name to
benches/results/serve.jsonl (load) or server.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llaisys.bench.http_client import Target, send, session_of
from llaisys.bench.request_record import RequestRecord
from llaisys.bench.serve_benchmark import ServeBenchmark
from llaisys.bench.workload import Workload
from peers import cpu_name
from server_health import health
from server_mask import mask
from server_overload import overload
from server_process import own_server
from server_streams import lag, streams

KEPT = ("max_concurrency", "completed", "failed", "output_throughput", "client")
GREEDY = {"temperature": 0, "ignore_eos": True}
RESULTS = Path(__file__).parent / "results"


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure greedy requests of 128 input and 128 output tokens, by concurrency."""
    if arguments.url:
        return {"url": arguments.url, "rows": _rows(arguments.url, arguments.concurrency)}
    with own_server("smollm2", "--log-level", "warning") as server:
        return {
            "start_s": server.start_s,
            "first_request_ttft_ms": 1e3 * asyncio.run(_first_ttft_s(server.url)),
            "rows": _rows(server.url, arguments.concurrency),
        }


async def _first_ttft_s(url: str) -> float:
    """Return the time to first token of a server's first request."""
    target, record = Target(base_url=url, model="smollm2", fields=GREEDY), RequestRecord(due_s=0.0)
    async with session_of(target) as session:
        await send(session, target, [1000] * 16, 2, record)
    assert not record.error, record.error
    return record.ttft_s


def _rows(url: str, concurrencies: list[int]) -> list[dict[str, Any]]:
    rows = []
    for concurrency in concurrencies:
        workload = Workload(num_prompts=max(8, 4 * concurrency), input_len=128, output_len=128)
        result = _bench(url, concurrency, workload)
        timed = [key for key in result if key.endswith(("_ttft_ms", "_tpot_ms", "_itl_ms"))]
        rows.append({key: result[key] for key in (*KEPT, *timed)})
        print(
            f"concurrency {concurrency}: "
            + "  ".join(f"{k} {result[k]:.1f}" for k in timed if "std" not in k)
        )
    return rows


def _bench(url: str, concurrency: int, workload: Workload) -> dict[str, Any]:
    target = Target(base_url=url, fields=GREEDY)
    return ServeBenchmark(target=target, workload=workload, max_concurrency=concurrency).run()[0]


STEPS: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "load": load,
    "overload": lambda arguments: overload(arguments.seconds),
    "health": lambda arguments: health(arguments.seconds / 2),
    "mask": lambda _: mask(),
    "streams": lambda _: streams(),
    "lag": lambda _: lag(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="+", choices=STEPS)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--url")
    arguments = parser.parse_args()
    for step in arguments.steps:
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record = {"bench": step, "when": when, "machine": cpu_name(), **STEPS[step](arguments)}
        print(
            json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=1), flush=True
        )
        out = RESULTS / ("serve.jsonl" if step == "load" else "server.jsonl")
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
