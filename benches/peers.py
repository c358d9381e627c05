"""One stream of SmolLM2 beside llama.cpp on the same file, alternated in one run.

usage: peers.py [--rounds 7] [--threads 2] [--new 128] [--peer-python .venv-peers/bin/python]

Both sides answer the same commands (`decode`, `prefill`) in turn, A B A B, so that a change of the machine's
memory speed hits both. Prints medians and the median of the pairwise ratios; writes a JSON file under
benches/results/. The peer's environment is made by `make bench-peers`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from llaisys._core import Context
from llaisys.hub import resolve_model

HERE = Path(__file__).parent


class Ours:
    """The context alone: what the core gives, without the engine above it."""

    def __init__(self, path: Path, n_threads: int) -> None:
        self.context = Context(
            str(path), n_cells=2048, n_seq_max=1, n_batch=512, max_model_len=2048, n_threads=n_threads
        )

    def step(self, seq: int, tokens: list[int], start: int) -> int:
        n = len(tokens)
        flags = np.zeros(n, np.uint8)
        flags[-1] = 1
        out = self.context.decode(
            np.array(tokens, np.int32),
            np.arange(start, start + n, dtype=np.int32),
            np.ones(n, np.int32),
            np.full(n, seq, np.int64),
            flags,
        )
        return int(out.token_ids[0])

    def decode(self, n_prompt: int, n_new: int) -> float:
        seq = self.context.seq_acquire()
        token = self.step(seq, [100 + i for i in range(n_prompt)], 0)
        start = time.perf_counter()
        for i in range(n_new):
            token = self.step(seq, [token], n_prompt + i)
        rate = n_new / (time.perf_counter() - start)
        self.context.seq_release(seq)
        return rate

    def prefill(self, n_tokens: int) -> float:
        seq = self.context.seq_acquire()
        start = time.perf_counter()
        self.step(seq, [100 + i for i in range(n_tokens)], 0)
        rate = n_tokens / (time.perf_counter() - start)
        self.context.seq_release(seq)
        return rate


class Peer:
    """llama.cpp in its own process and environment."""

    def __init__(self, python: str, path: Path, n_threads: int) -> None:
        command = [python, str(HERE / "peer_llama_cpp.py"), str(path), str(n_threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._line().split()[1]

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the llama.cpp peer ended; is llama-cpp-python in its environment?")
        return line

    def ask(self, *words: object) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return float(self._line())


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--peer-python", default=".venv-peers/bin/python")
    args = parser.parse_args()
    path = resolve_model("smollm2").path
    ours, peer = Ours(path, args.threads), Peer(args.peer_python, path, args.threads)
    rows: dict[str, list[tuple[float, float]]] = {}
    for command in (("decode", 64, args.new), ("prefill", 512)):
        name = " ".join(map(str, command))
        getattr(ours, command[0])(*command[1:])
        peer.ask(*command)
        rows[name] = [
            (getattr(ours, command[0])(*command[1:]), peer.ask(*command)) for _ in range(args.rounds)
        ]
    result = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {args.threads} threads",
        "isa": ours.context.isa,
        "peer": f"llama-cpp-python {peer.version}",
        "model": path.name,
        "unit": "tokens a second, [ours, llama.cpp] a round",
        "rounds": rows,
    }
    for name, pairs in rows.items():
        a, b = statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
        ratio = statistics.median(p[0] / p[1] for p in pairs)
        print(f"{name:20} ours {a:8.1f}  llama.cpp {b:8.1f}  ratio {ratio:.2f}")
    out = HERE / "results" / "peers-llama-cpp.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
