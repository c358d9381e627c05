"""The comparison with other engines: parsing of their output and the ratios. No engine runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benches" / "peers.py"


def test_outputs_of_other_engines_are_parsed_and_ratios_are_correct() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "--smoke"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
