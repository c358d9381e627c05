"""Measure /health while four clients repeatedly send bodies of 27 MB, half of them in chunks.

At the default limit each body is rejected with 413. If the server has a flag for the limit, a second run
raises it to 32 MiB, so that every body is read, parsed and tokenized. Probes are due 20 times per second,
even if the last one has no response yet, and timed from when they were due. Goal at the default limit: p99 at
most 50 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from llaisys.bench.http_client import Target, session_of
from server_process import on_client_core, own_server

N_SENDERS, PROBES_A_SECOND, BODY_BYTES, RAISED_BYTES = 4, 20, 27_000_000, 32 * 2**20
PIECE, LIMIT_FLAG = 256 * 1024, "--max-body-bytes"
FLAGS = ("smollm2", "--num-threads", "1", "--num-kv-cells", "8192", "--log-level", "warning")


def health(seconds: float) -> dict[str, Any]:
    """Measure both limits, `seconds` seconds each."""
    result = {"default": _under(seconds, ())}
    if _has(LIMIT_FLAG):
        result["raised"] = _under(seconds, (LIMIT_FLAG, str(RAISED_BYTES)))
    else:
        result["raised"] = {"left_out": f"this server has no {LIMIT_FLAG}"}
    return result


def _has(flag: str) -> bool:
    command = [sys.executable, "-m", "llaisys", "serve", "--help"]
    return f"{flag} " in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _under(seconds: float, flags: tuple[str, ...]) -> dict[str, Any]:
    with own_server(*FLAGS, *flags) as server, on_client_core():
        context = multiprocessing.get_context("spawn")
        counts: Any = context.Queue()
        sender = context.Process(target=_flood, args=(server.url, seconds + 1, counts))
        sender.start()
        rss_bytes = [server.process.memory_info().rss]
        time.sleep(1)
        probes_ms = asyncio.run(
            _probe(server.url, seconds, lambda: rss_bytes.append(server.process.memory_info().rss))
        )
        answers = counts.get()
        sender.join()
    return {
        "flags": list(flags),
        "seconds": seconds,
        "probes": len(probes_ms),
        "health_p50_ms": float(np.percentile(probes_ms, 50)),
        "health_p99_ms": float(np.percentile(probes_ms, 99)),
        "health_max_ms": max(probes_ms),
        "bodies": answers,
        "rss_growth_mb": (max(rss_bytes) - rss_bytes[0]) / 1e6,
    }


async def _probe(url: str, seconds: float, on_probe: Any) -> list[float]:
    """Return the milliseconds of each probe, from when it was due."""
    took_ms: list[float] = []
    async with session_of(Target(base_url=url)) as session:

        async def probe(due_s: float) -> None:
            async with session.get(f"{url}/health") as answer:
                await answer.read()
                assert answer.status == 200
            took_ms.append(1e3 * (time.perf_counter() - due_s))

        start_s, tasks = time.perf_counter(), []
        for i in range(int(seconds * PROBES_A_SECOND)):
            due_s = start_s + i / PROBES_A_SECOND
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(probe(due_s)))
            on_probe()
        await asyncio.gather(*tasks)
    return took_ms


def _flood(url: str, seconds: float, counts: Any) -> None:
    """Send bodies from a separate process; count the statuses, `cut` for a connection without a response."""
    words = "the tide comes in and the tide goes out, " * (BODY_BYTES // 41)
    body = json.dumps({"model": "smollm2", "messages": [{"role": "user", "content": words}]}).encode()
    end_s, answers = time.monotonic() + seconds, Counter[str]()

    def send_again_and_again(is_declared: bool) -> None:
        while time.monotonic() < end_s:
            answers[_send(url, body, is_declared)] += 1

    with ThreadPoolExecutor(N_SENDERS) as threads:
        for i in range(N_SENDERS):
            threads.submit(send_again_and_again, i % 2 == 0)
    counts.put(dict(answers))


def _send(url: str, body: bytes, is_declared: bool) -> str:
    """Send a body with a declared length or in chunks; return the status or `cut`.

    Uses plain sockets, which can read a response sent during the upload even if the connection is closed.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    length = f"content-length: {len(body)}" if is_declared else "transfer-encoding: chunked"
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"{length}\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=60) as connection:
        with contextlib.suppress(OSError):  # the server closed the connection during the upload
            connection.sendall(head.encode())
            for start in range(0, len(body), PIECE):
                piece = body[start : start + PIECE]
                connection.sendall(piece if is_declared else b"%x\r\n%b\r\n" % (len(piece), piece))
            connection.sendall(b"" if is_declared else b"0\r\n\r\n")
        try:
            return connection.recv(64).split(b" ")[1].decode()
        except (OSError, IndexError):
            return "cut"
