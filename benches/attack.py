"""Run every case of tests/attack against a server, and measure the effect on another client.

usage: attack.py [--only WORD] [--port PORT --pid PID]

One server of SmolLM2 has two API keys. While a case runs with the first key, a separate process streams with
the second key and calls /livez ten times per second. Goals for each case:

- only the allowed replies, and the same server process
- /livez within 1 s, and no gap over 1 s between two pieces of the stream
- memory within 64 MB of its value before

Writes one line per case and a summary to benches/results/attack.jsonl; the exit code is 0 if all goals are
met. Not part of `make test`, because it is timed; `tests/e2e/test_attack.py` checks the replies there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from attack.corpus import CASES
from attack.target import Case, Target
from serving import serving

OUT = Path(__file__).parent / "results" / "attack.jsonl"
KEYS = ("sk-attacker-0123456789", "sk-neighbor-0123456789")
FLAGS = ("--num-kv-cells", "16384", "--max-num-seqs", "16", "--log-level", "warning")
LIVEZ_S, GAP_S, MEMORY_BYTES = 1.0, 1.0, 64 << 20
# Freed memory returns to the system within a few seconds of idle time (server/lifecycle.py).
REST_S = 20.0
STREAM = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0,
}


class Neighbor:
    """A client that shares the server with the attacker; one thread streams, another calls /livez."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._worst: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        for work in (self._stream, self._probe):
            threading.Thread(target=work, daemon=True).start()

    def serve(self, line: Connection) -> None:
        """Reply to each message with the measurements since the last one."""
        while True:
            line.recv()
            with self._lock:
                seen = {**self._worst, **self._counts}
                self._worst.clear()
                self._counts.clear()
            line.send(seen)

    def _note(self, name: str, seconds: float) -> None:
        with self._lock:
            self._worst[name] = max(self._worst.get(name, 0.0), seconds)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _probe(self) -> None:
        raw = self._target.head("GET", "/livez", "Connection: close", key=None)
        while True:
            begin_s = time.monotonic()
            reply = self._exchange(raw)
            self._note("livez_max_s", time.monotonic() - begin_s)
            self._count("livez_ok" if b" 200 " in reply[:16] else "livez_failed")
            time.sleep(0.1)

    def _exchange(self, raw: bytes) -> bytes:
        with contextlib.suppress(OSError), contextlib.closing(self._target.connect()) as client:
            client.sendall(raw)
            return client.recv(4096)
        return b""

    def _stream(self) -> None:
        raw = self._target.request(
            "POST", "/v1/completions", json.dumps(STREAM).encode(), self._target.other_key
        )
        while True:
            with contextlib.suppress(OSError), contextlib.closing(self._target.connect()) as client:
                client.sendall(raw)
                self._count("streams_whole" if self._read_stream(client) else "streams_failed")
                continue
            self._count("streams_failed")
            time.sleep(0.1)

    def _read_stream(self, client: socket.socket) -> bool:
        """Return True if the stream ended normally. The wait for the first piece is recorded separately."""
        last_s, name, tail = time.monotonic(), "first_piece_max_s", b""
        while piece := client.recv(65536):
            now_s = time.monotonic()
            self._note(name, now_s - last_s)
            last_s, tail = now_s, (tail + piece)[-4096:]
            name = "gap_max_s" if b"data: " in tail else name
        return b"data: [DONE]" in tail


def neighbor(target: Target, line: Connection) -> None:
    """Run the neighbor in a separate process, so that the attacker does not delay its clock."""
    Neighbor(target).serve(line)


@contextlib.contextmanager
def watched(target: Target) -> Iterator[Connection]:
    """Start the neighbor; yield the connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=neighbor, args=(target, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()


def resident_bytes(pid: int) -> int:
    """Return the resident bytes of the server and its children."""
    server = psutil.Process(pid)
    return sum(each.memory_info().rss for each in [server, *server.children(recursive=True)])


def seen(line: Connection) -> dict[str, Any]:
    """Return the neighbor's measurements since the last call."""
    line.send(None)
    measured: dict[str, Any] = line.recv()
    return measured


def run(case: Case, target: Target, line: Connection) -> dict[str, Any]:
    """Run a case and return its result. `wrong` lists the missed goals."""
    before = resident_bytes(target.pid)
    seen(line)
    statuses: Counter[str] = Counter()
    wrong = []
    begin_s = time.monotonic()
    try:
        for reply in case.attack(target):
            statuses[str(reply.status)] += 1
            if reply.status not in case.allowed:
                wrong.append(f"status {reply.status}")
    except (AssertionError, OSError) as error:
        wrong.append(f"{type(error).__name__}: {error}"[:300])
    took_s = time.monotonic() - begin_s
    alive = psutil.pid_exists(target.pid) and psutil.Process(target.pid).status() != psutil.STATUS_ZOMBIE
    if not alive:
        return {"case": case.name, "group": case.group, "wrong": [*wrong, "the server ended"], "ended": True}
    until_s = time.monotonic() + REST_S
    while (grown := resident_bytes(target.pid) - before) > MEMORY_BYTES and time.monotonic() < until_s:
        time.sleep(0.5)
    noticed = seen(line)
    for name, most in (("livez_max_s", LIVEZ_S), ("gap_max_s", GAP_S)):
        if noticed.get(name, 0.0) > most:
            wrong.append(f"{name} {noticed[name]:.2f}")
    wrong += [f"{name} {noticed[name]}" for name in ("livez_failed", "streams_failed") if noticed.get(name)]
    if grown > MEMORY_BYTES:
        wrong.append(f"memory +{grown >> 20} MiB")
    return {
        "case": case.name,
        "group": case.group,
        "seconds": round(took_s, 2),
        "statuses": dict(statuses),
        "grown_mib": grown >> 20,
        **{name: round(value, 3) for name, value in noticed.items()},
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name or group contains this word")
    only = parser.parse_args().only
    cases = [case for case in CASES if only in case.name or only in case.group]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), "smollm2", *FLAGS, key=",".join(KEYS)) as server,
        OUT.open("a" if only else "w", encoding="utf-8") as out,
    ):
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        target = Target(host, int(port), server.process.pid, *KEYS)
        missed = 0
        print(json.dumps({"at": datetime.now(timezone.utc).isoformat(), "cases": len(cases)}), file=out)
        for token in (1, 2):  # touch every KV cell, so that no case is charged for their memory
            target.post("/v1/completions", {"prompt": [token] * 8100, "max_tokens": 1})
        with watched(target) as line:
            time.sleep(3.0)
            for case in cases:
                result = run(case, target, line)
                missed += bool(result["wrong"])
                print(json.dumps(result), file=out, flush=True)
                print(
                    "ok  " if not result["wrong"] else "FAIL",
                    case.group,
                    case.name,
                    result["wrong"],
                    flush=True,
                )
                if result.get("ended"):
                    print(server.log.read_text("utf-8")[-3000:])
                    break
        verdict = {"verdict": "passed" if not missed else "missed", "cases": len(cases), "missed": missed}
        print(json.dumps(verdict), file=out)
        print(json.dumps(verdict))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
