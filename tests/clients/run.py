"""Serve SmolLM2 and run calls.py against it with the Python of another environment."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import serving

KEY = "sesame"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="the Python that has the clients")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, "smollm2", "--num-kv-cells", "4096", key=KEY) as server:
            calls = str(Path(__file__).with_name("calls.py"))
            return subprocess.run([python, calls, f"{server.url}/v1", KEY, name], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
