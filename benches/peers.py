"""Compare LLAISYS with llama.cpp, ik_llama.cpp and OpenVINO: rounds of alternating engines, ratios per round.

usage: peers.py [--only PATTERN ...] [--rounds 7] [--budget-s SECONDS] [--fresh] [--report] [--list] [--smoke]

A round of a row measures every engine once, starting with another one each round, and the machine's read
bandwidth and f32 rate before and after each. It also records the load average before the run, and the CPU
time that the hypervisor gave to other machines (steal). A tree with uncommitted changes is refused. Rounds
are kept in benches/results/peers-rounds.jsonl, so a run continues where the previous one ended (exit status
3: rows remain). Rounds of another build of the core or another machine are discarded when their row is
measured. PATTERN is a row, a glob (`decode-1-*`, see --list) or `targets`: the rows that have a target
(peers_rows.py). Each run rewrites the table and the JSON. CPUs without AVX-512 have a table and rounds of
their own (peers-avx2.md). So has a CPU with AVX-512 when LLAISYS_ISA=avx2 limits LLAISYS (`make
bench-peers-avx2`): llama.cpp is then its build for AVX2, as ik_llama.cpp's wheel always is. Build the peers
first: `make bench-peers` does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import peers_report
from peers_engines import ISA_LIMIT, MODELS, LlamaTools, MachineSpeed, PeerError, Resident, start, versions
from peers_http import Server
from peers_rows import TARGETS, Row, is_ours, isa, rows

RESULTS = Path(__file__).parent / "results"
ROWS_ARE_LEFT = 3

TARGET_ROWS = [*TARGETS, "overhead-16-bf16"]

Engine = Resident | LlamaTools | Server


class Bench:
    """The measured rounds, and the loaded engines."""

    def __init__(self, budget_s: float) -> None:
        self.end = time.monotonic() + budget_s
        self.build, self.machine = build_id(), machine()
        self.stem = stem(self.machine)
        self.file = self.stem.with_name(f"{self.stem.name}-rounds.jsonl")
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        self.rounds: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.engines: dict[tuple[str, ...], Engine] = {}
        self.speed: MachineSpeed | None = None
        self.longest_s = 0.0
        self.load = os.getloadavg()[0]

    def of(self, row: Row) -> list[dict[str, Any]]:
        own = (row.name, self.build, self.machine)
        return [r for r in self.rounds if (r["row"], r["build"], r["machine"]) == own]

    def drop(self, row: Row, *, fresh: bool) -> None:
        """Discard the row's rounds of other builds and machines, or all."""
        kept = [] if fresh else self.of(row)
        self.rounds = [r for r in self.rounds if r["row"] != row.name] + kept

    def save(self) -> None:
        part = self.file.with_suffix(".part")
        part.write_text("".join(json.dumps(r) + "\n" for r in self.rounds), encoding="utf-8")
        part.replace(self.file)

    def engine(self, row: Row, name: str) -> Engine:
        """Return the engine, loaded once for all rows of its model; a server is started per row."""
        key = (name, row.engines[name], row.kind if row.kind in ("http", "overhead") else "")
        key += (row.name,) if row.kind == "http" else ()
        if key not in self.engines:
            if row.kind == "http":
                self.engines[key] = Server(name, row.engines[name], row.n)
            else:
                self.engines[key] = start(name, row)
        return self.engines[key]

    def unload(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.engines.clear()

    def machine_speed(self) -> tuple[float, float]:
        """Return 10^9 bytes and 10^9 f32 operations per second."""
        if self.speed is None:
            self.speed = MachineSpeed()
        return self.speed.measure("read"), self.speed.measure("flops")

    def measure(self, row: Row, n_done: int) -> dict[str, Any]:
        """Measure one round."""
        names = [name for name in row.engines if is_available(name)]
        first = n_done % len(names)
        order = names[first:] + names[:first]
        speeds, rates, took_s = [self.machine_speed()], {}, {}
        before = cpu_times()
        for name in order:
            begun = time.monotonic()
            rates[name] = rate(self.engine(row, name), row)
            took_s[name] = round(time.monotonic() - begun, 1)
            speeds.append(self.machine_speed())
        stolen, total = (now - then for now, then in zip(cpu_times(), before, strict=True))
        return {
            "row": row.name,
            "build": self.build,
            "machine": self.machine,
            "load": self.load,
            "steal": stolen / total,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "order": order,
            "gb_s": [gb_s for gb_s, _ in speeds],
            "gflops": [gflops for _, gflops in speeds],
            "rates": rates,
            "took_s": took_s,
        }

    def run(self, row: Row, n_rounds: int) -> bool:
        """Measure rounds up to the number required; return False if the time budget ends first."""
        names = [name for name in row.engines if is_available(name)]
        n_rounds = row.n_rounds(n_rounds)
        done = self.of(row)
        if len(done) < n_rounds:
            for name in names:  # loading and the first steps are not measured
                if time.monotonic() > self.end:
                    return False
                begun = time.monotonic()
                engine = self.engine(row, name)
                if not isinstance(engine, LlamaTools):
                    rate(engine, row)
                print(f"{row.name:22} {name} ready in {time.monotonic() - begun:.1f} s", flush=True)
        while len(done := self.of(row)) < n_rounds:
            begun = time.monotonic()
            if begun + self.longest_s > self.end:
                return False
            self.rounds.append(self.measure(row, len(done)))
            self.longest_s = time.monotonic() - begun
            self.save()
            print(peers_report.round_line(self.rounds[-1]), flush=True)
        return True


def rate(engine: Engine, row: Row) -> dict[str, float]:
    """Return tokens per second (overhead: a fraction) by context, 0 for none."""
    if isinstance(engine, Server):
        return engine.http(row.n)
    if row.kind == "prefill":
        return engine.prefill(row.n)
    if row.kind == "embed":
        return engine.embed(row.n)
    if row.kind == "overhead":
        assert isinstance(engine, Resident)
        return engine.overhead(row)
    return engine.decode(row)


def is_available(engine: str) -> bool:
    """Return whether this version supports the engine's settings, and the engine the limit of LLAISYS_ISA.

    OpenVINO has such a limit, ONEDNN_MAX_CPU_ISA, but then it fails at its first step.
    """
    from llaisys.config import Config

    if engine == "openvino" and ISA_LIMIT:
        return False
    setting = engine.partition("/")[2] if is_ours(engine) else ""
    return not setting or "quantization" in Config.model_fields


def build_id() -> str:
    """Return the start of the compiled core's hash."""
    from llaisys import _core

    return hashlib.sha256(Path(str(_core.__file__)).read_bytes()).hexdigest()[:12]


def cpu_name() -> str:
    """Return the CPU's name from the kernel."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def machine() -> str:
    """Return the processor's name, its best instruction set, and the one that LLAISYS is limited to."""
    from llaisys import _core

    limit = f" limited to {ISA_LIMIT}" if ISA_LIMIT else ""
    return f"{cpu_name()}, {os.cpu_count()} CPUs, {_core.available_isas()[0]}{limit}"


def stem(machine: str) -> Path:
    """Return the path of a machine's results without their suffix: what AVX-512 does is a table of its
    own."""
    name = isa(machine)
    return RESULTS / ("peers" if name.startswith("avx512") else f"peers-{name}")


def cpu_times() -> tuple[int, int]:
    """Return the stolen and the total ticks of all CPUs since the start of the machine (man 5 proc_stat)."""
    # The last two are parts of the first two.
    ticks = [int(word) for word in Path("/proc/stat").read_text("utf-8").splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def git(*arguments: str) -> str:
    """Return the output of a git command; empty if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=RESULTS).stdout.strip()


def is_dirty() -> bool:
    """Return whether there are uncommitted changes, except in the results that this script writes."""
    return bool(git("status", "--porcelain", "--", ":/", ":(exclude,top)benches/results"))


def commit() -> str:
    """Return the commit of the sources."""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if is_dirty() else "")


def committed_rows(name: str) -> dict[str, Any]:
    """Return the summaries of the last committed results `name`, by row."""
    text = git("show", f"HEAD:./{name}.json")
    rows: dict[str, Any] = json.loads(text)["rows"] if text else {}
    return rows


def prepare() -> None:
    """Link the embedded model into the folder of the peers' models."""
    from llaisys.hub import resolve_model

    link = MODELS / "smollm2.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(resolve_model("smollm2").path)


def main() -> int:
    """Parse the flags, measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["*"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true", help="discard the rows' rounds and start over")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="check parsing and arithmetic; needs no peer")
    args = parser.parse_args()
    if args.smoke:
        import peers_smoke

        peers_smoke.check()
        return 0
    patterns = [p for only in args.only for p in (TARGET_ROWS if only == "targets" else [only])]
    chosen = [row for row in rows() if any(fnmatch(row.name, pattern) for pattern in patterns)]
    if args.list or not chosen:
        print("\n".join(row.name for row in (chosen or rows())))
        return 0 if chosen else 2
    if not args.report and is_dirty():
        sys.exit("the tree has uncommitted changes, so the figures would belong to no commit; commit first")
    bench = Bench(args.budget_s)
    left = chosen if args.report else measure_all(bench, chosen, args)
    before = committed_rows(bench.stem.name)
    peers_report.write(bench.rounds, bench.stem, {"llaisys": commit(), **versions()}, before)
    if left and not args.report:
        print(f"{len(left)} rows are left; run the command again: {' '.join(r.name for r in left[:8])}")
        return ROWS_ARE_LEFT
    return 0


def measure_all(bench: Bench, chosen: list[Row], args: argparse.Namespace) -> list[Row]:
    """Measure the rows in turn; return those that still have too few rounds."""
    prepare()
    loaded = ""
    try:
        for row in chosen:
            bench.drop(row, fresh=args.fresh)
            group = row.precision + (row.name if row.kind in ("http", "overhead") else "")
            if group != loaded:
                bench.unload()
            loaded = group
            try:
                if not bench.run(row, args.rounds):
                    break
            except PeerError as error:
                sys.exit(f"{row.name}: {error}")
    finally:
        bench.unload()
        bench.save()
    return [row for row in chosen if len(bench.of(row)) < row.n_rounds(args.rounds)]


if __name__ == "__main__":
    sys.exit(main())
