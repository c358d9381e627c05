"""Load on a running server: time to first token, time per token, throughput.

usage: serve.py [--url http://127.0.0.1:8000] [--requests 64] [--concurrency 1 4 16] [--max-tokens 128]

Without --url it starts `llaisys serve` with the embedded model on a free port, times the start (process start
to /ready), and ends it. Each stream is counted chunk by chunk as the client sees it. Writes JSON lines to
benches/results/serve.jsonl, the machine's name in each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import httpx

from peers import cpu_name

PROMPT = "Explain in a few sentences how a tide table is made, and why each harbour needs its own."


@contextmanager
def own_server(args: list[str]) -> Iterator[tuple[str, float]]:
    """Starts a server on a free port; yields its address and the seconds from process start to readiness."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "llaisys", "serve", "--port", "0", "--log-level", "warning", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = next(line.split()[-1] for line in process.stdout if "http://" in line)
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.01)
    try:
        yield url, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(10)


async def one(client: httpx.AsyncClient, max_tokens: int) -> tuple[float, list[float]]:
    """First-token time and the gaps between later chunks, in seconds."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    sent, last, first, gaps = time.perf_counter(), 0.0, 0.0, []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            if not delta.get("content"):
                continue
            now = time.perf_counter()
            if first:
                gaps.append(now - last)
            else:
                first = now - sent
            last = now
    return first, gaps


async def load(url: str, n_requests: int, concurrency: int, max_tokens: int) -> dict[str, float]:
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def gated() -> tuple[float, list[float]]:
            async with gate:
                return await one(client, max_tokens)

        start = time.perf_counter()
        results = await asyncio.gather(*(gated() for _ in range(n_requests)))
        wall = time.perf_counter() - start
    firsts = sorted(first for first, _ in results)
    gaps = sorted(gap for _, g in results for gap in g)
    return {
        "concurrency": concurrency,
        "requests": n_requests,
        "tokens_per_s": n_requests * max_tokens / wall,
        "ttft_median_ms": 1e3 * statistics.median(firsts),
        "ttft_p99_ms": 1e3 * firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))],
        "gap_median_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
    }


def run(url: str, args: argparse.Namespace) -> list[dict[str, float]]:
    asyncio.run(load(url, 2, 2, 8))
    rows = []
    for concurrency in args.concurrency:
        row = asyncio.run(load(url, max(args.requests, concurrency), concurrency, args.max_tokens))
        rows.append(row)
        print("  ".join(f"{key} {value:.1f}" for key, value in row.items()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=128)
    args, server_args = parser.parse_known_args()
    record: dict[str, object] = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": cpu_name(),
        "server_args": server_args,
    }
    if args.url:
        record["rows"] = run(args.url, args)
    else:
        with own_server(server_args) as (url, seconds):
            first = asyncio.run(load(url, 1, 1, 2))["ttft_median_ms"]
            print(f"start to ready {seconds:.2f} s, first request's first token {first:.0f} ms")
            record |= {"start_s": seconds, "first_request_ttft_ms": first, "rows": run(url, args)}
    with (Path(__file__).parent / "results" / "serve.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
