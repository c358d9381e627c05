"""The comparison with other engines: what reads their output and makes the ratios. No engine runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benches" / "peers.py"


def test_the_benchmark_understands_its_peers_and_its_arithmetic_is_right() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--smoke"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
