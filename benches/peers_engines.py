"""The engines behind one interface: `decode`, `prefill` and `http` return tokens per second.

llama.cpp is measured by its own tools, one process per measurement, which warm up themselves; the others by
resident processes. All use the same threads. Settings that differ from a peer's defaults are those that were
fastest on the machine of the committed results (benches/results/README.md).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from peers_rows import LONG, LONG_NEW, SETTINGS, THREADS, Row

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / ".venv-peers"
MODELS = PEERS / "models"
BATCH = ["-b", "2048", "-ub", "512"]
# The instruction set that LLAISYS is limited to, by its own setting; None: it uses the machine's best.
ISA_LIMIT = os.environ.get("LLAISYS_ISA")
BUILDS = {
    "llama.cpp": PEERS / "src/vendor/llama.cpp" / ("build-avx2/bin" if ISA_LIMIT == "avx2" else "build/bin")
}
SCRIPTS = {"ik_llama.cpp": "peer_ik.py", "openvino": "peer_openvino.py"}


class PeerError(Exception):
    """A peer that did not run, or unexpected output of a peer."""


def environment(engine: str) -> dict[str, str]:
    """Return an environment in which a peer's tools find the libraries next to them."""
    return {**os.environ, "LD_LIBRARY_PATH": str(BUILDS[engine])}


class Talker:
    """A process that returns one line for each input line."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(f"{' '.join(self.command)} ended; run it by hand to see why")
        return line

    def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.line()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class MachineSpeed:
    """Memory read bandwidth in 10^9 bytes per second, and 10^9 f32 operations per second."""

    def __init__(self) -> None:
        self.talker = Talker([str(PEERS / "bin" / "machine_speed"), str(THREADS)])

    def measure(self, what: str) -> float:
        """`what`: read or flops."""
        return float(self.talker.ask(what))


class Resident:
    """An engine in a separate process that stays loaded."""

    def __init__(self, command: list[str]) -> None:
        self.talker = Talker(command)
        if self.talker.line().strip() != "ready":
            raise PeerError(f"{' '.join(command)} is not ready")

    def ask(self, *words: object) -> dict[str, float]:
        answer: dict[str, float] = json.loads(self.talker.ask(*words))
        return answer

    def decode(self, row: Row) -> dict[str, float]:
        """Return tokens per second at each context."""
        seconds = {c: self.ask(row.kind, row.n, c, row.n_new)["seconds"] for c in row.contexts}
        return {str(c): row.n * row.n_new / s for c, s in seconds.items()}

    def prefill(self, n_tokens: int) -> dict[str, float]:
        return {"0": n_tokens / self.ask("prefill", n_tokens)["seconds"]}

    def embed(self, n_tokens: int) -> dict[str, float]:
        return {"0": n_tokens / self.ask("embed", n_tokens)["seconds"]}

    def overhead(self, row: Row) -> dict[str, float]:
        """Return the fraction of a step's time outside the core (`--timed`), at each context."""
        parts = {c: self.ask("decode", row.n, c, row.n_new) for c in row.contexts}
        return {str(c): 1 - part["core_s"] / part["seconds"] for c, part in parts.items()}

    def close(self) -> None:
        self.talker.close()


class LlamaTools:
    """llama-batched-bench and llama-bench."""

    def __init__(self, engine: str, model: Path) -> None:
        self.engine, self.model = engine, model
        self.bin = BUILDS[engine]

    def run(self, tool: str, *args: str) -> str:
        command = [str(self.bin / tool), "-m", str(self.model), "-t", str(THREADS), *args]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(self.engine))
        if done.returncode:
            raise PeerError(f"{' '.join(command)}: {done.stderr[-300:]}")
        return done.stdout + done.stderr

    def decode(self, row: Row) -> dict[str, float]:
        """Return tokens per second at each context; the prompt is computed once and copied to the other
        sequences, if the model allows it."""
        cells = row.n * (max(row.contexts) + row.n_new + 16)
        contexts = ",".join(map(str, row.contexts))
        shape = ["-c", str(cells), "-npp", contexts, "-ntg", str(row.n_new), "-npl", str(row.n)]
        shape += ["-pps"] if row.copies_prompt else []
        shape += ["-ctk", "q8_0", "-ctv", "q8_0"] if row.has_int8_cells else []
        rates = batched_bench_rates(self.run("llama-batched-bench", *shape, *BATCH, "-fa", "on"))
        return {str(c): rates[c, row.n] for c in row.contexts}

    def prefill(self, n_tokens: int) -> dict[str, float]:
        shape = ["-p", str(n_tokens), "-n", "0", "-r", "1", "-fa", "1", "-o", "json"]
        shape += ["--no-warmup"] if n_tokens in LONG.values() else []  # it would be the whole prompt
        return {"0": bench_rate(self.run("llama-bench", *shape))}

    def embed(self, n_tokens: int) -> dict[str, float]:
        shape = ["-p", str(n_tokens), "-n", "0", "-r", "1", "-embd", "1", "-o", "json"]
        return {"0": bench_rate(self.run("llama-bench", *shape))}

    def close(self) -> None:
        """Nothing to release."""


def batched_bench_rates(output: str) -> dict[tuple[int, int], float]:
    """Return tokens per second of generation by (context, streams), from the table of llama-batched-bench."""
    rates = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("|") and len(cells) == 10 and cells[0].isdigit():
            rates[int(cells[0]), int(cells[2])] = float(cells[7])
    if not rates:
        raise PeerError(f"no table in the output of llama-batched-bench: {output[-300:]!r}")
    return rates


def bench_rate(output: str) -> float:
    """Return tokens per second from the JSON list of llama-bench (log lines may surround it)."""
    found = re.search(r"^\[$.*?^\]$", output, re.DOTALL | re.MULTILINE)
    if not found:
        raise PeerError(f"no JSON in the output of llama-bench: {output[-300:]!r}")
    (only,) = json.loads(found[0])
    return float(only["avg_ts"])


def start(engine: str, row: Row) -> Resident | LlamaTools:
    """Load an engine for the rows of a model."""
    model = MODELS / row.engines[engine]
    name, _, setting = engine.partition("/")
    if name == "llaisys":
        command = [sys.executable, str(HERE / "peer_ours.py"), str(model), str(THREADS)]
        command += ["--quantization", setting] if setting else []
        command += SETTINGS.get(row.precision, [])
        return Resident(command + (["--timed"] if row.kind == "overhead" else []))
    if name in SCRIPTS:
        python = str(PEERS / "bin" / "python")
        command = [python, str(HERE / SCRIPTS[name]), str(model), str(THREADS)]
        if row.precision in LONG:
            command += [str(LONG[row.precision] + LONG_NEW), *(["q8_0"] if row.has_int8_cells else [])]
        return Resident(command)
    return LlamaTools(engine, model)


def versions() -> dict[str, str]:
    """Return the versions that scripts/build-peers.sh recorded."""
    found: dict[str, str] = json.loads((PEERS / "versions.json").read_text("utf-8"))
    if ISA_LIMIT == "avx2":
        found["llama.cpp"] = found["llama.cpp"].replace("native build", "built for AVX2")
    return found
