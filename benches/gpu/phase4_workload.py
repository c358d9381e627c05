"""Phase 4: 256 sequences at once, ours beside transformers' continuous batching and nano-vllm.

usage: phase4_workload.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240] [--fresh]

The workload is nano-vllm's `bench.py`: seed 0, prompts and answers of 100 to 1,024 tokens, ids below
10,000, temperature 0.6, the end of text ignored; 142,827 tokens in, 133,966 out. Each row is a process of
its own, so that no engine has another's memory. Latency is measured by a second run of ours, in which each
request is a stream.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
from common import Column, Phase, Row, Skip, arguments, is_importable
from workload import ENGINES, Unavailable, Workload

EXPECTED_S = {"0.5B": 60.0, "1.5B": 80.0, "7B": 130.0}
# Of the budget, for what comes after a row.
RESERVE_S = 5.0
COLUMNS = [
    Column("tokens_per_s", "tokens/s out", "{:.0f}"),
    Column("seconds", "s", "{:.1f}"),
    Column("n_out", "tokens out"),
    Column("ttft_p50_ms", "first token p50, ms", "{:.0f}"),
    Column("ttft_p99_ms", "p99", "{:.0f}"),
    Column("tpot_p50_ms", "per token p50, ms", "{:.2f}"),
    Column("tpot_p99_ms", "p99", "{:.2f}"),
    Column("memory_gb", "peak GPU memory, GB", "{:.1f}"),
    Column("how", "how"),
]


def nano_vllm_workload(dry_run: bool) -> Workload:
    """The draws in the order in which nano-vllm's bench.py makes them."""
    n, shortest, longest, ids = (4, 3, 6, 500) if dry_run else (256, 100, 1024, 10_000)
    draw = random.Random(0)
    prompts = [[draw.randint(0, ids) for _ in range(draw.randint(shortest, longest))] for _ in range(n)]
    return Workload(prompts, [draw.randint(shortest, longest) for _ in range(n)], 0.6, dry_run)


def measure(phase: Phase, out: Path, inputs: Path, engine: str, name: str) -> dict[str, Any]:
    """One row, in a process of its own, which may take what is left of the budget."""
    shape = models.TINY if phase.dry_run else models.QWEN[name]
    folder = models.random_model(out, inputs, name, shape)
    command = [sys.executable, __file__, "--out", str(out), "--inputs", str(inputs)]
    command += ["--engine", engine, "--model", str(folder), *(["--dry-run"] if phase.dry_run else [])]
    room_s = phase.left_s() - RESERVE_S
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=room_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise Skip(f"{engine} had not ended after {room_s:.0f} s") from late
    if ran.returncode == 0:
        values: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return values
    words = (ran.stderr or ran.stdout).strip().splitlines()[-8:]
    if ran.returncode == Unavailable.EXIT or not engine.startswith("ours"):
        raise Skip(f"{engine}: " + " / ".join(words[-1:] if ran.returncode == Unavailable.EXIT else words))
    raise RuntimeError("\n".join(words))


def child(flags: argparse.Namespace) -> int:
    """The process of a row: one JSON line."""
    if flags.engine == "nano-vllm":
        # Behind what is installed: flash-attn itself, if it is there.
        sys.path += [str(flags.inputs / "nano-vllm"), str(Path(__file__).parent / "shim")]
    run: Callable[..., dict[str, Any]] = ENGINES[flags.engine]
    try:
        print(json.dumps(run(flags.model, nano_vllm_workload(flags.dry_run))))
    except Unavailable as why:
        print(why, file=sys.stderr)
        return Unavailable.EXIT
    return 0


def main() -> int:
    """Reads the flags and measures."""
    parser = arguments(__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.engine:
        return child(flags)
    phase = Phase(4, "256 sequences at once", COLUMNS, flags)
    one = partial(measure, phase, flags.out, flags.inputs)
    names = ["tiny"] if flags.dry_run else list(models.QWEN)
    rows = [
        Row(f"{name}, {engine}", partial(one, engine, name), EXPECTED_S.get(name, 0.0))
        for name in names
        for engine in ENGINES
    ]
    if not is_importable("torch"):
        phase.note("Peak GPU memory needs torch or nvidia-smi.")
    return phase.run(rows)


if __name__ == "__main__":
    sys.exit(main())
