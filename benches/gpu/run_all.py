"""Run all phases on a machine with a GPU, in one command.

usage: run_all.py --out DIR [--work DIR] [--only 1,3] [--dry-run] [-- more arguments for every phase]

It runs the unpacked bundle in its own folder (bundle.py). Nothing is installed and nothing is downloaded. The
work folder keeps each phase's state, so that a run that was killed, or whose time was over, continues when it
is started again. After each phase `results.tar.gz` and `summary.md` in --out are written again, because such
a machine returns few files.

Exit status: 0, all phases are done; 1, one failed; 3, the time is over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DONE, FAILED, LEFT = 0, 1, 3
# Seconds after its budget until a phase is stopped as stuck.
GRACE_S = 75.0
# With fewer seconds left, no phase starts.
LEAST_S = 30.0


class Runner:
    """The phases, their exit statuses, and the output folders."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.monotonic()
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        options.out.mkdir(parents=True, exist_ok=True)
        self.manifest = manifest()
        self.state_path = self.work / "run_all.json"
        self.status: dict[str, int] = {}
        if self.state_path.exists():
            before = json.loads(self.state_path.read_text("utf-8"))
            if before["manifest"] == self.manifest and before["dry_run"] == options.dry_run:
                self.status = before["status"]

    def left_s(self) -> float:
        """Return the seconds of the whole run that are left."""
        return float(self.options.total_s) - (time.monotonic() - self.begun)

    def run(self) -> int:
        """Run every phase that is not done, and return the worst status."""
        phases = sorted(self.options.phases.glob("phase[0-9]_*.py"))
        wanted = set(self.options.only.split(",")) if self.options.only else None
        for script in phases:
            number = script.name[5]
            if wanted is not None and number not in wanted:
                continue
            if self.status.get(script.name) == DONE:
                print(f"{script.name}: done before")
                continue
            budget_s = min(float(self.options.budget_s), self.left_s() - GRACE_S)
            if budget_s < LEAST_S:
                print(f"{script.name}: left, {self.left_s():.0f} s are left of the run")
                self.status[script.name] = LEFT
            else:
                self.status[script.name] = self.phase(script, budget_s)
            self.save()
        self.save()
        print((self.options.out / "summary.md").read_text("utf-8"))
        return max(self.status.values(), default=DONE, key=lambda status: (status == FAILED, status))

    def phase(self, script: Path, budget_s: float) -> int:
        """Run one phase, with its output in a log in the work folder."""
        print(f"{script.name}: {budget_s:.0f} s", flush=True)
        command = [sys.executable, "-u", str(script), "--out", str(self.work), "--budget-s", str(budget_s)]
        command += ["--dry-run"] if self.options.dry_run else []
        command += self.options.arguments
        with (self.work / f"{script.stem}.log").open("ab") as log:
            try:
                ran = subprocess.run(
                    command,
                    env=environment(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=budget_s + GRACE_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"{script.name}: stuck, and stopped", flush=True)
                return LEFT
        print(f"{script.name}: exit status {ran.returncode}", flush=True)
        return ran.returncode if ran.returncode in (DONE, LEFT) else FAILED

    def save(self) -> None:
        """Write state and results. A killed run leaves the previous files complete."""
        state = {"manifest": self.manifest, "dry_run": self.options.dry_run, "status": self.status}
        replace(self.state_path, (json.dumps(state, indent=1) + "\n").encode())
        words = {DONE: "done", FAILED: "FAILED", LEFT: "not ended"}
        lines = ["# Phases on this machine", "", f"bundle {self.manifest}", ""]
        lines += [f"- {name}: {words[status]}" for name, status in sorted(self.status.items())]
        tables = [path.read_text("utf-8") for path in sorted(self.work.glob("phase[0-9].md"))]
        replace(self.options.out / "summary.md", "\n\n".join(["\n".join(lines), *tables]).encode())
        archive = self.options.out / "results.tar.gz"
        part = archive.with_name("results.part")
        with tarfile.open(part, "w:gz") as tar:
            for path in sorted(self.work.iterdir()):
                if path.suffix in (".json", ".md", ".log"):
                    tar.add(path, path.name)
        part.replace(archive)


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


def environment() -> dict[str, str]:
    """Return a phase's environment: the bundle's packages before the machine's, and no network access."""
    paths = [str(HERE / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def manifest() -> str:
    """Return the bundle's revision. Exits if a file differs from the manifest."""
    path = HERE / "manifest.json"
    if not path.exists():
        return "from a source tree"
    known: dict[str, Any] = json.loads(path.read_text("utf-8"))
    for name, entry in known["files"].items():
        if hashlib.sha256((HERE / name).read_bytes()).hexdigest() != entry["sha256"]:
            raise SystemExit(f"{name} differs from the manifest: unpack the bundle again")
    return str(known["revision"])


def main(given: Sequence[str] | None = None) -> int:
    """Parse the flags and run the phases that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results.tar.gz and summary.md")
    parser.add_argument("--work", type=Path, default=Path("/tmp/llaisys-gpu"), help="the phases' state")
    parser.add_argument("--phases", type=Path, default=HERE, help="folder of the phases' scripts")
    parser.add_argument("--only", default="", help="numbers of phases, separated by commas")
    parser.add_argument("--dry-run", action="store_true", help="passed to every phase")
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds of a phase (default: 240)")
    parser.add_argument(
        "--total-s",
        type=float,
        default=570.0,
        help="seconds of this run (default: 570); a command on that machine may take 600",
    )
    parser.add_argument("arguments", nargs="*", help="after --: more arguments for every phase")
    return Runner(parser.parse_args(given)).run()


if __name__ == "__main__":
    sys.exit(main())
