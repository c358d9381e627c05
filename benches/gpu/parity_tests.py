"""The Rust parity tests as a program: build it, list its tests, parse their output."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The name of a device that is not a GPU (crates/llaisys-core/tests/cuda/emulator/mod.rs).
EMULATOR = "emulator"
# The test binary, and the module of the tests that run on the emulator or on a GPU.
BINARY, PARITY = "cuda", "parity::"
SOURCES = ROOT / "crates" / "llaisys-core" / "tests" / "cuda" / "parity"


def build(profile: str, root: Path = ROOT) -> Path:
    """Build the test program if it is not up to date, and return its path. `cargo test` builds `test`."""
    command = [
        "cargo",
        "test",
        "-p",
        "llaisys-core",
        "--profile",
        profile,
        "--no-run",
        "--message-format=json",
        "--test",
        BINARY,
    ]
    ran = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in ran.stdout.splitlines()]
    made = [m for m in messages if m["reason"] == "compiler-artifact" and m["target"]["kind"] == ["test"]]
    return next(Path(m["executable"]) for m in made if m["executable"] and m["target"]["name"] == BINARY)


def list_tests(program: Path) -> list[str]:
    """The parity tests in a program, as `parity::OP::TEST`."""
    command = [program, PARITY, "--list", "--format", "terse"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.removesuffix(": test") for line in ran.stdout.splitlines() if line.endswith(": test")]


@dataclass
class Outcome:
    """The output of a run of tests: cases by (op, dtype), devices, and the cases that are left for a GPU."""

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_case: str = ""
    last_key: tuple[str, str] | None = None
    devices: set[str] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)
    panic: str = ""

    @classmethod
    def of(cls, stdout: str, stderr: str) -> Outcome:
        """Parse the lines that pick.rs prints, and the first panic of the test harness."""
        found = cls()
        # The harness prints `test NAME ... ` without a newline before a test's own output.
        for line in re.sub(r"^test \S+ \.\.\. ", "", stdout, flags=re.M).splitlines():
            if case := re.fullmatch(r"case: (\S+) (\S+) (.*)", line):
                found.last_key = (case[1], case[2])
                found.cases[found.last_key] += 1
                found.last_case = line.removeprefix("case: ")
            elif line.startswith("device: "):
                found.devices.add(line.removeprefix("device: "))
            elif left := re.fullmatch(r"left for a GPU: (.*), (\d+) cases", line):
                found.left[left[1]] = found.left.get(left[1], 0) + int(left[2])
        if panic := re.search(r"panicked at .*?:\n(.*?)(?:\nnote: |\Z)", stderr, flags=re.S):
            found.panic = " ".join(panic[1].split())
        return found

    def n_cases(self) -> int:
        """Return the number of cases."""
        return self.cases.total()

    def passed(self, is_ok: bool) -> list[tuple[str, str, int, int]]:
        """Return rows (op, dtype, cases, passed cases). In a failed test all cases except the last passed."""
        return [
            (op, dtype, n, n - (not is_ok and (op, dtype) == self.last_key))
            for (op, dtype), n in self.cases.items()
        ]
