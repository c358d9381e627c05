"""The charts of the README show what benches/results/peers.json says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_charts_are_those_of_the_committed_results(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "benches/chart.py", str(tmp_path)], cwd=ROOT, check=True)
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == ["performance-dark.svg", "performance-light.svg"]
    for path in drawn:
        committed = (ROOT / "docs" / "assets" / path.name).read_text("utf-8")
        assert committed == path.read_text("utf-8"), "run python benches/chart.py"
