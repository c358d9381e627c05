"""Phase 1: the parity tests on a GPU, graphs compared with eager passes, compute-sanitizer over small cases.

usage: phase1_parity.py --out DIR [--tests PROGRAM] [--only TEXT] [--jobs N] [--dry-run] [--budget-s 240]

The rows are the Rust parity tests of crates/llaisys-core/tests/cuda/parity, prebuilt (bundle.py). Each runs
in its own process, so that a fault in one cannot break the CUDA context of another. `--jobs` of them run at
once, because the references, which run on the CPU, take most of the time. A dry run uses the emulator instead
of the GPU, or the device that LLAISYS_TEST_DEVICE names. Exit status: see common.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Column, Failure, Phase, Row, Skip, arguments
from parity_tests import EMULATOR, PARITY, Outcome, list_tests

# A test takes seconds. This is its timeout on a GPU that hangs.
TEST_S = 100
SANITIZER_S = 90
# Test modules of kernels with shared memory or barriers of several warps, which racecheck and synccheck
# examine.
WITH_BARRIERS = ("attention", "gemv", "rows", "sampling")
TOOLS = ("memcheck", "racecheck", "synccheck")
# Messages of compute-sanitizer where it does not work, for example on some virtual machines.
CANNOT = ("Device not supported", "Unable to find injection", "did not launch", "Internal Sanitizer Error")


class ParityPhase(Phase):
    """The phase with a second table, by op and dtype."""

    def table(self) -> str:
        """Return both tables as Markdown."""
        cases: Counter[tuple[str, str]] = Counter()
        good: Counter[tuple[str, str]] = Counter()
        for values in (*self.state["rows"].values(), *self.state["failed"].values()):
            for op, dtype, n, n_good in values.get("by_op", ()):
                cases[op, dtype] += n
                good[op, dtype] += n_good
        lines = ["## Parity by op", "", "op | dtype | cases | passed | failed", "--- | --- | --- | --- | ---"]
        lines += [
            f"{op} | {dtype} | {n} | {good[op, dtype]} | {n - good[op, dtype]}"
            for (op, dtype), n in sorted(cases.items())
        ]
        return "\n".join(lines) + "\n\n" + super().table()


class Tests:
    """The test program. Runs its tests."""

    def __init__(self, program: Path, dry_run: bool) -> None:
        self.program, self.dry_run = program, dry_run

    def environment(self, device: str) -> dict[str, str]:
        """Return a test's environment: the device, and the folders of PyTorch's NVRTC and cublasLt."""
        if self.dry_run:
            return {"LLAISYS_TEST_DEVICE": EMULATOR, **os.environ}
        named = os.environ.get("LLAISYS_CUDA_LIB_DIR") or os.pathsep.join(map(str, library_folders()))
        return {**os.environ, "LLAISYS_TEST_DEVICE": device, "LLAISYS_CUDA_LIB_DIR": named}

    def run(self, name: str) -> dict[str, Any]:
        """Run one test. Raises Failure with the case that failed."""
        command = [str(self.program), name, "--exact", "--nocapture", "--test-threads=1"]
        try:
            ran = subprocess.run(
                command,
                env=self.environment("gpu"),
                capture_output=True,
                text=True,
                timeout=TEST_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            outcome = Outcome.of(*((part or b"").decode() for part in (late.stdout, late.stderr)))
            raise Failure(
                f"timeout of {TEST_S} s in: {outcome.last_case}", **values_of(outcome, False)
            ) from None
        outcome = Outcome.of(ran.stdout, ran.stderr)
        if ran.returncode != 0:
            why = outcome.panic or f"exit status {ran.returncode}: {ran.stderr.strip()[-300:]}"
            raise Failure(f"{outcome.last_case}: {why}"[:600], **values_of(outcome, False))
        if "1 passed" not in ran.stdout:
            raise Failure("the program did not run exactly one test")
        if not self.dry_run and EMULATOR in outcome.devices:
            raise Failure("it ran on the emulator")
        return values_of(outcome, True)

    def sanitize(self, tool: str, module: str) -> dict[str, Any]:
        """Run the small cases of a test module under a tool of compute-sanitizer."""
        sanitizer = find_sanitizer()
        if self.dry_run or sanitizer is None:
            raise Skip("a dry run has no GPU" if self.dry_run else "compute-sanitizer is not installed")
        command = [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99"]
        try:
            ran = subprocess.run(
                [*command, str(self.program), f"{PARITY}{module}::", "--nocapture", "--test-threads=1"],
                env=self.environment("gpu-small"),
                capture_output=True,
                text=True,
                timeout=SANITIZER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Skip(f"it did not end within {SANITIZER_S} s") from None
        text = ran.stdout + ran.stderr
        if refused := next((reason for reason in CANNOT if reason in text), None):
            raise Skip(f"compute-sanitizer does not work here: {refused}")
        summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        if summary is None:
            raise Failure(f"no summary, exit status {ran.returncode}: {text.strip()[-300:]}")
        if ran.returncode != 0:
            first = [line[9:].strip() for line in text.splitlines() if line.startswith("=========")]
            raise Failure(f"{summary[0]}: {' / '.join(first[1:6])}")
        outcome = Outcome.of(ran.stdout, ran.stderr)
        devices = ", ".join(sorted(outcome.devices))
        return {"cases": outcome.n_cases(), "device": devices, "result": summary[0]}


def values_of(outcome: Outcome, is_ok: bool) -> dict[str, Any]:
    """Return a row's values."""
    by_op = outcome.passed(is_ok)
    return {
        "cases": outcome.n_cases(),
        "result": "passed" if is_ok else "failed",
        "device": ", ".join(sorted(outcome.devices)) or "none",
        "left": sum(outcome.left.values()),
        "by_op": by_op,
    }


def library_folders() -> list[Path]:
    """Return the library folders of PyTorch's packages.

    As `llaisys.config.cuda_library_folders`, which is not used because the parity tests do not need the
    wheel.
    """
    spec = find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or ()
    folders = [Path(place, part, "lib") for place in places for part in ("cu13", "cuda_nvrtc", "cublas")]
    return [folder for folder in folders if folder.is_dir()]


def find_sanitizer() -> str | None:
    """Return compute-sanitizer from the path, or from the CUDA installation."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def timed(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a task's values with its seconds. The phase sees only how long it waited for the task."""
    begun = time.monotonic()
    values = task()
    return {**values, "seconds": round(time.monotonic() - begun, 2)}


def tasks_of(tests: Tests, only: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return rows' names and functions: one for each test, then each test module under each tool."""
    names = list_tests(tests.program)
    tasks = {name.removeprefix(PARITY): partial(tests.run, name) for name in names}
    modules = sorted({name.split("::")[1] for name in names})
    for tool in TOOLS:
        for module in modules:
            if tool == "memcheck" or module in WITH_BARRIERS:
                tasks[f"{tool} {module}"] = partial(tests.sanitize, tool, module)
    return {name: task for name, task in tasks.items() if only in name}


def main(given: Sequence[str] | None = None) -> int:
    """Parse the flags and run the rows that are left."""
    parser = arguments(__doc__)
    program = Path(__file__).parent / "tests" / "cuda"
    parser.add_argument("--tests", type=Path, default=program, help="the test program")
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: 1)")
    options: argparse.Namespace = parser.parse_args(given)
    columns = [
        Column("device", "device"),
        Column("cases", "cases"),
        Column("left", "left for a GPU"),
        Column("result", "result"),
        Column("seconds", "s", "{:.1f}"),
    ]
    phase = ParityPhase(1, "Parity tests and compute-sanitizer", columns, options)
    tasks = tasks_of(Tests(options.tests, phase.dry_run), options.only)
    pool = ThreadPoolExecutor(options.jobs)
    left = {name: task for name, task in tasks.items() if phase.done(name) is None}
    waits = {name: pool.submit(timed, task).result for name, task in left.items()}
    status = phase.run(
        [
            Row(name, waits.get(name, task), expected_s=60 if name.startswith(TOOLS) else 5)
            for name, task in tasks.items()
        ]
    )
    pool.shutdown(cancel_futures=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
