"""Phase 1: the parity table on a GPU, graphs beside eager passes, compute-sanitizer over the small cases.

usage: phase1_parity.py --out DIR [--tests PROGRAM] [--only TEXT] [--dry-run] [--budget-s 240]

The rows are the Rust parity tests of crates/llaisys-core/tests/cuda/parity, prebuilt (bundle.py). Each runs
in its own process, so that a fault in one cannot break another's CUDA context. A dry run uses the emulator
instead of the GPU, or the device that LLAISYS_TEST_DEVICE names. Exit status as in common.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Column, Failure, Phase, Row, Skip, arguments
from parity_tests import EMULATOR, PARITY, Outcome, list_tests

# A test takes seconds; on a GPU that hangs it takes this long.
TEST_S = 100
SANITIZER_S = 90
# Kernels with shared memory or barriers of several warps; the others' tools have nothing to look at.
WITH_BARRIERS = ("attention", "gemv", "rows", "sampling")
# What compute-sanitizer says where it cannot work, as on some virtual machines.
CANNOT = ("Device not supported", "Unable to find injection", "did not launch", "Internal Sanitizer Error")


class ParityPhase(Phase):
    """The table by op and dtype in front of the tests'."""

    def table(self) -> str:
        """The Markdown."""
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
    """The test program, and how its tests are run."""

    def __init__(self, program: Path, dry_run: bool) -> None:
        self.program, self.dry_run = program, dry_run

    def environment(self, device: str) -> dict[str, str]:
        """Of a test's process: the device, and where PyTorch's packages have NVRTC and cublasLt."""
        if self.dry_run:
            return {"LLAISYS_TEST_DEVICE": EMULATOR, **os.environ}
        named = os.environ.get("LLAISYS_CUDA_LIB_DIR") or os.pathsep.join(map(str, library_folders()))
        return {**os.environ, "LLAISYS_TEST_DEVICE": device, "LLAISYS_CUDA_LIB_DIR": named}

    def run(self, name: str) -> dict[str, Any]:
        """One test. Raises Failure with the case that failed."""
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
            said = Outcome.of(*((part or b"").decode() for part in (late.stdout, late.stderr)))
            raise Failure(f"{TEST_S} s were over in: {said.last_case}", **values_of(said, False)) from None
        said = Outcome.of(ran.stdout, ran.stderr)
        if ran.returncode != 0:
            why = said.panic or f"exit status {ran.returncode}: {ran.stderr.strip()[-300:]}"
            raise Failure(f"{said.last_case}: {why}"[:600], **values_of(said, False))
        if "1 passed" not in ran.stdout:
            raise Failure("the program ran another number of tests than one")
        if not self.dry_run and EMULATOR in said.devices:
            raise Failure("it ran on the emulator")
        return values_of(said, True)

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
            raise Skip(f"{SANITIZER_S} s were over before the end") from None
        text = ran.stdout + ran.stderr
        if refused := next((reason for reason in CANNOT if reason in text), None):
            raise Skip(f"compute-sanitizer does not work here: {refused}")
        summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
        if summary is None:
            raise Failure(f"no summary, exit status {ran.returncode}: {text.strip()[-300:]}")
        if ran.returncode != 0:
            first = [line[9:].strip() for line in text.splitlines() if line.startswith("=========")]
            raise Failure(f"{summary[0]}: {' / '.join(first[1:6])}")
        said = Outcome.of(ran.stdout, ran.stderr)
        return {"cases": said.n_cases(), "device": ", ".join(sorted(said.devices)), "result": summary[0]}


def values_of(said: Outcome, is_ok: bool) -> dict[str, Any]:
    """A row's values."""
    by_op = said.passed(is_ok)
    return {
        "cases": said.n_cases(),
        "result": "passed" if is_ok else "failed",
        "device": ", ".join(sorted(said.devices)) or "none",
        "left": sum(said.left.values()),
        "by_op": by_op,
    }


def library_folders() -> list[Path]:
    """Where PyTorch's packages have them, as `llaisys.config.cuda_library_folders` looks for them: parity
    does not wait for the wheel."""
    spec = find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or ()
    folders = [Path(place, part, "lib") for place in places for part in ("cu13", "cuda_nvrtc", "cublas")]
    return [folder for folder in folders if folder.is_dir()]


def find_sanitizer() -> str | None:
    """In the path, or where CUDA is installed."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def rows_of(tests: Tests, only: str) -> list[Row]:
    """Return a row for each test, then one for each test module under each tool."""
    names = list_tests(tests.program)
    rows = [Row(name.removeprefix(PARITY), partial(tests.run, name), expected_s=5) for name in names]
    modules = sorted({name.split("::")[1] for name in names})
    for tool in ("memcheck", "racecheck", "synccheck"):
        for module in modules:
            if tool == "memcheck" or module in WITH_BARRIERS:
                run = partial(tests.sanitize, tool, module)
                rows.append(Row(f"{tool} {module}", run, expected_s=60))
    return [row for row in rows if only in row.name]


def main(given: Sequence[str] | None = None) -> int:
    """Reads the flags and runs what is left."""
    parser = arguments(__doc__)
    program = Path(__file__).parent / "tests" / "cuda"
    parser.add_argument("--tests", type=Path, default=program, help="the test program")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options: argparse.Namespace = parser.parse_args(given)
    columns = [
        Column("device", "device"),
        Column("cases", "cases"),
        Column("left", "left for a GPU"),
        Column("result", "result"),
        Column("took_s", "s", "{:.1f}"),
    ]
    phase = ParityPhase(1, "Parity tests and compute-sanitizer", columns, options)
    return phase.run(rows_of(Tests(options.tests, phase.dry_run), options.only))


if __name__ == "__main__":
    sys.exit(main())
