"""Load time and memory of a model, each load in a separate process. `make bench-load`.

Peak memory is VmHWM; RssAnon at the end, compared with it, shows the memory that only the load needs. Appends
to benches/results/load.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llaisys.hub import resolve_model

RESULTS = Path(__file__).parent / "results" / "load.jsonl"
CHILD = """
import json, sys, time
from pathlib import Path
import llaisys._core as core

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

before = status("RssAnon")
start = time.perf_counter()
context = core.Context(
    sys.argv[1], dtype=sys.argv[2], n_threads=int(sys.argv[3]),
    n_cells=256, n_seq_max=4, n_batch=64, max_model_len=256,
)
seconds = time.perf_counter() - start
print(json.dumps({
    "load_s": seconds, "weights": context.weight_bytes, "peak_rss": status("VmHWM"),
    "anonymous_before": before, "anonymous": status("RssAnon"),
}))
"""


def load(path: Path, dtype: str, n_threads: int) -> dict[str, Any]:
    """Load once in a new process."""
    command = [sys.executable, "-c", CHILD, str(path), dtype, str(n_threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def main() -> None:
    """Measure and print one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", nargs="+", default=["auto", "bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    path = resolve_model(arguments.model).path
    for dtype in arguments.dtype:
        runs = [load(path, dtype, arguments.threads) for _ in range(arguments.repeats)]
        row = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": platform.machine(),
            "threads": arguments.threads,
            "model": arguments.model,
            "dtype": dtype,
            "file_mb": round(path.stat().st_size / 1e6, 1),
            "load_s_median": round(statistics.median(run["load_s"] for run in runs), 3),
            "load_s_best": round(min(run["load_s"] for run in runs), 3),
            "packed_weights_mb": round(runs[0]["weights"] / 1e6, 1),
            "peak_rss_mb": round(max(run["peak_rss"] for run in runs) / 1e6, 1),
            "anonymous_mb": round(max(run["anonymous"] - run["anonymous_before"] for run in runs) / 1e6, 1),
        }
        print(json.dumps(row))
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
