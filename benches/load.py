"""Time and memory from the start of a process to its first token, compared with llama.cpp. `make bench-load`.

usage: load.py [--models NAME ...] [--rounds 5] [--no-peer]

Each load is a process of its own. `cold` drops the file from the page cache first, `warm` reads it once.
Rounds alternate LLAISYS and llama.cpp (`llama-bench` with a prompt of one token, without its warm-up).
Seconds are from the start of the process to its first token, or to the end of llama-bench; `load_s` of
LLAISYS is without the start of Python and its imports.
A cold load depends on how far the system reads ahead: `read_ahead_kb` is 128 by default, often more on
virtual machines. The files are those of peers_shapes.py (`make bench-peers` builds llama.cpp and writes
them) and the embedded model.

Memory is VmHWM, compared with the bytes of the packed weights. Before each load, all free memory is touched:
a virtual machine gets its memory from the host at the first touch, which takes up to 1.8 s for 1 GB, and
gives it back some seconds after a process has freed it. Appends to benches/results/load.jsonl.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llaisys.hub import resolve_model
from peers_engines import BUILDS, MODELS, environment
from peers_rows import THREADS

RESULTS = Path(__file__).parent / "results" / "load.jsonl"
# A virtual disk may be throttled after some GB: the next 3.3 GB came at 1 instead of 2.2 GB/s, after 5 s
# at full rate.
DISK_RECOVERS_S = 10
EMBEDDED = "smollm2"
DEFAULT = [EMBEDDED, "dense-3b-q4_0", "dense-8b-q4_0", "dense-3b-q8_0", "experts-q4_0", "q05-bf16"]
CHILD = """
import json, sys, time
from pathlib import Path
from llaisys import LLM, SamplingParams

start = time.perf_counter()
llm = LLM(sys.argv[1], num_threads=int(sys.argv[2]), max_model_len=256, max_num_seqs=4, num_kv_cells=1024,
          speculative_config=None)
params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
llm.generate([{"prompt_token_ids": [5]}], params, use_tqdm=False)
seconds = time.perf_counter() - start
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({"load_s": seconds, "peak_bytes": int(peak.split()[1]) * 1024,
                  "packed_bytes": llm.model_info.packed_bytes["auto"]}), flush=True)
"""


def read_ahead_kb(path: Path) -> int | None:
    """Return how far the system reads ahead on the disk of `path`; None if unknown."""
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    # A partition has the setting of its disk.
    settings = (disk / "bdi" / "read_ahead_kb" for disk in (folder, folder / ".."))
    return next((int(setting.read_text()) for setting in settings if setting.exists()), None)


def touch_memory() -> None:
    """Touch the memory that is free."""
    n_bytes = int(0.9 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:: 2 << 20] = bytes(len(range(0, n_bytes, 2 << 20)))


def prepare(path: Path, *, cold: bool) -> None:
    """Drop the file from the page cache, or read it."""
    with path.open("rb") as file:
        if cold:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(DISK_RECOVERS_S)
        else:
            while file.read(64 << 20):
                pass


def ours(path: Path) -> dict[str, Any]:
    """Load once; return the seconds from the process's start to its first token, and what it measured."""
    command = [sys.executable, "-c", CHILD, str(path), str(THREADS)]
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process_s = time.perf_counter() - start_s
    measured: dict[str, Any] = json.loads(line)
    return {"process_s": process_s, **measured}


def llama_cpp(path: Path) -> float:
    """Load once; return the seconds of the process."""
    tool = BUILDS["llama.cpp"] / "llama-bench"
    shape = ["-p", "1", "-n", "0", "-r", "1", "--no-warmup"]
    start_s = time.perf_counter()
    subprocess.run(
        [str(tool), "-m", str(path), "-t", str(THREADS), *shape],
        env=environment("llama.cpp"),
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start_s


def measure(name: str, path: Path, *, cold: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of one file and state of the page cache."""
    own, peer = [], []
    for round_ in range(arguments.rounds):
        for engine in ("ours", "peer") if round_ % 2 else ("peer", "ours"):
            if engine == "peer" and arguments.no_peer:
                continue
            prepare(path, cold=cold)
            touch_memory()
            if engine == "ours":
                own.append(ours(path))
            else:
                peer.append(llama_cpp(path))
    row = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "threads": THREADS,
        "model": name,
        "cache": "cold" if cold else "warm",
        "read_ahead_kb": read_ahead_kb(path),
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "process_s": [round(run["process_s"], 3) for run in own],
        "load_s": [round(run["load_s"], 3) for run in own],
        "load_s_median": round(statistics.median(run["load_s"] for run in own), 3),
        "packed_weights_mb": round(own[0]["packed_bytes"] / 1e6, 1),
        "peak_rss_mb": round(max(run["peak_bytes"] for run in own) / 1e6, 1),
    }
    if peer:
        row["llama_cpp_s"] = [round(seconds, 3) for seconds in peer]
        row["llama_cpp_s_median"] = round(statistics.median(peer), 3)
    return row


def main() -> None:
    """Measure and print one line per file and state of the page cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="measure LLAISYS only")
    arguments = parser.parse_args()
    for name in arguments.models:
        path = resolve_model(name).path if name == EMBEDDED else MODELS / f"{name}.gguf"
        for cold in (False, True):
            row = measure(name, path, cold=cold, arguments=arguments)
            print(json.dumps(row), flush=True)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
