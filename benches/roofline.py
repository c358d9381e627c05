"""Compare each matrix product of `cargo bench --bench kernels` with the roofline of the machine.

usage: roofline.py [--criterion target/criterion] [--speed FILE]

A product of n rows cannot be faster than reading its weights, nor than its operations at the peak rate. The
larger of these times divided by the measured time is the fraction of the roofline. `machine_speed` measures
the read bandwidth and the f32 rate at that moment. Products of bf16 and of integers count as a multiple of
the f32 rate that depends on the instruction set (peers_limits.py).
Bytes of weights are the benchmark's own. A fraction above 1 means that the weights were cached, or that the
machine was busy during one of the measurements.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers_limits import Speed

ROOT = Path(__file__).parents[1]
TIMED_BY_BYTES = 16  # rows below which the benchmark's throughput is bytes, and from which on operations


@dataclass(frozen=True)
class Product:
    """One shape, format and number of rows: median seconds, bytes of weights, operations."""

    group: str
    rows: int
    seconds: float
    n_bytes: float
    n_operations: float

    def share(self, speed: Speed) -> float:
        """Return the fraction of the roofline; 1 is the machine's limit."""
        rate = speed.gflops * speed.times_f32(self.group.split("-")[1])
        least_s = max(self.n_bytes / speed.gb_s, self.n_operations / rate) / 1e9
        return least_s / self.seconds


def products(criterion: Path) -> Iterator[Product]:
    """Read criterion's results by group and rows."""
    for group in sorted(criterion.glob("linear-*")):
        runs = {}
        for path in group.glob("*/new/benchmark.json"):
            about = json.loads(path.read_text("utf-8"))
            median = json.loads(path.with_name("estimates.json").read_text("utf-8"))["median"]
            runs[int(about["function_id"])] = (about["throughput"], 1e-9 * median["point_estimate"])
        per_row = {n: t["Elements"] / n for n, (t, _) in runs.items() if n >= TIMED_BY_BYTES}
        if 1 not in runs or not per_row:
            continue
        n_bytes, operations = runs[1][0]["Bytes"], next(iter(per_row.values()))
        for n, (_, seconds) in sorted(runs.items()):
            yield Product(group.name, n, seconds, n_bytes, n * operations)


def machine_speed(tool: Path) -> Speed:
    """Return the speed of all usable CPUs."""
    from llaisys import _core

    n_threads = re.findall(r"^processor", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    asked = subprocess.run(
        [str(tool), str(len(n_threads))], input="read\nflops\n", capture_output=True, text=True, check=True
    )
    gb_s, gflops = map(float, asked.stdout.split())
    return Speed.of(gb_s, gflops, _core.available_isas()[0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--criterion", type=Path, default=ROOT / "target" / "criterion")
    parser.add_argument("--speed", type=Path, default=ROOT / "target" / "machine_speed")
    args = parser.parse_args()
    speed = machine_speed(args.speed)
    print(f"read {speed.gb_s:.1f} GB/s, f32 {speed.gflops:.0f} GFLOP/s\n")
    print(f"{'product':22} {'rows':>5} {'us':>10} {'GB/s':>7} {'GOP/s':>7} {'of the roofline':>16}")
    for each in products(args.criterion):
        bandwidth, rate = each.n_bytes / each.seconds / 1e9, each.n_operations / each.seconds / 1e9
        share = each.share(speed)
        figures = f"{1e6 * each.seconds:10.1f} {bandwidth:7.1f} {rate:7.0f} {share:15.0%}"
        print(f"{each.group:22} {each.rows:5} {figures}")


if __name__ == "__main__":
    main()
