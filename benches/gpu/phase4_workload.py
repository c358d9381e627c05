"""Phase 4: 256 sequences at once, compared with transformers' continuous batching and nano-vllm.

usage: phase4_workload.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240] [--fresh]

The workload is that of nano-vllm's `bench.py`: seed 0, prompts and completions of 100 to 1,024 tokens, ids
below 10,000, temperature 0.6, end-of-text tokens ignored. It has 142,827 tokens in, 133,966 out. Each row
runs in its own process, so that no engine uses the memory of another. A second run of our engine, in which
each request is a stream, measures latency.
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

# Approximate time of a row on an H200.
EXPECTED_S = {"0.5B": 20.0, "1.5B": 25.0, "7B": 50.0}
TRANSFORMERS_S = 80.0
# Seconds of the budget that are kept for the end of the phase.
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
    """Return the workload, with the random draws in the order of nano-vllm's bench.py."""
    n, shortest, longest, ids = (4, 3, 6, 500) if dry_run else (256, 100, 1024, 10_000)
    draw = random.Random(0)
    prompts = [[draw.randint(0, ids) for _ in range(draw.randint(shortest, longest))] for _ in range(n)]
    return Workload(prompts, [draw.randint(shortest, longest) for _ in range(n)], 0.6, dry_run)


def measure(phase: Phase, out: Path, inputs: Path, engine: str, name: str) -> dict[str, Any]:
    """Measure one row in its own process, which may use the rest of the budget."""
    shape = models.TINY if phase.dry_run else models.QWEN[name]
    folder = models.random_model(out, inputs, name, shape)
    command = [sys.executable, __file__, "--out", str(out), "--inputs", str(inputs)]
    command += ["--engine", engine, "--model", str(folder), *(["--dry-run"] if phase.dry_run else [])]
    timeout_s = phase.left_s() - RESERVE_S
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise Skip(f"{engine} did not end within {timeout_s:.0f} s") from late
    if ran.returncode == 0:
        values: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return values
    lines = (ran.stderr or ran.stdout).strip().splitlines()[-8:]
    if ran.returncode == Unavailable.EXIT or not engine.startswith("ours"):
        raise Skip(f"{engine}: " + " / ".join(lines[-1:] if ran.returncode == Unavailable.EXIT else lines))
    raise RuntimeError("\n".join(lines))


def child(flags: argparse.Namespace) -> int:
    """Run the process of a row, which prints one JSON line."""
    if flags.engine == "nano-vllm":
        # Behind the installed packages, so that flash-attn itself is used if it is installed.
        sys.path += [str(flags.inputs / "nano-vllm"), str(Path(__file__).parent / "shim")]
    run: Callable[..., dict[str, Any]] = ENGINES[flags.engine]
    try:
        print(json.dumps(run(flags.model, nano_vllm_workload(flags.dry_run))))
    except Unavailable as why:
        print(why, file=sys.stderr)
        return Unavailable.EXIT
    return 0


def main() -> int:
    """Parse the flags and measure."""
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
        Row(
            f"{name}, {engine}",
            partial(one, engine, name),
            EXPECTED_S.get(name, 0.0) + (TRANSFORMERS_S if engine == "transformers" else 0.0),
        )
        for engine in ENGINES  # the slowest last
        for name in names
    ]
    if not is_importable("torch"):
        phase.note("Peak GPU memory needs torch or nvidia-smi.")
    return phase.run(rows)


if __name__ == "__main__":
    sys.exit(main())
