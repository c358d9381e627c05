"""Common code of the phases of `benches/gpu`: rows that are measured once, their table, the device's facts.

A phase is a script `phaseN_name.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240]`. It measures rows
one after the other, keeps them in DIR/phaseN.json, and writes DIR/phaseN.md after each row. A run continues
where the previous one ended. A row that cannot be measured is skipped with a reason, which is printed, and
the next run tries it again. This module needs only the standard library, because nothing is installed on the
machine.

Exit status: 0, nothing is left (skipped rows are in the table); 1, a row failed; 3, the time is over.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

DONE, FAILED, ROWS_ARE_LEFT = 0, 1, 3


class Skip(Exception):
    """A row that cannot be measured here; the text has the reason."""


class Failure(Exception):
    """A row that was measured and is wrong; the state keeps `values` and the reason."""

    def __init__(self, reason: str, **values: Any) -> None:
        super().__init__(reason)
        self.values = values


@dataclass(frozen=True)
class Row:
    """One row: its name, the function that measures it and returns a flat JSON dict, its expected seconds."""

    name: str
    measure: Callable[[], dict[str, Any]]
    expected_s: float = 0.0


@dataclass(frozen=True)
class Column:
    """A column of the table: a key of the rows' values, its title and its format."""

    key: str
    title: str
    form: str = "{}"

    def of(self, values: dict[str, Any]) -> str:
        value = values.get(self.key)
        return "" if value is None else self.form.format(value)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the parser with the flags that all phases have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of JSON, table and random models")
    parser.add_argument(
        "--inputs",
        type=Path,
        default=Path(__file__).parent / "inputs",
        help="folder that prepare.py wrote (default: inputs)",
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes; timings mean nothing")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=240.0,
        help="seconds; no row starts that would end after them (default: 240)",
    )
    parser.add_argument("--fresh", action="store_true", help="ignore the rows of earlier runs")
    return parser


class Phase:
    """The rows of a phase, kept in a file."""

    def __init__(
        self, number: int, title: str, columns: Sequence[Column], options: argparse.Namespace
    ) -> None:
        self.title, self.columns, self.dry_run = title, columns, bool(options.dry_run)
        self.begun, self.budget_s = time.monotonic(), float(options.budget_s)
        out: Path = options.out
        out.mkdir(parents=True, exist_ok=True)
        self.state_path, self.table_path = out / f"phase{number}.json", out / f"phase{number}.md"
        self.state: dict[str, Any] = {
            "phase": number,
            "title": title,
            "dry_run": self.dry_run,
            "build": build_id(),
            "facts": machine_facts(),
            "notes": [],
            "rows": {},
            "skipped": {},
            "failed": {},
            "stuck": {},
            "begun": None,
        }
        if self.state_path.exists() and not options.fresh:
            self._take_over(json.loads(self.state_path.read_text("utf-8")))

    def _take_over(self, before: dict[str, Any]) -> None:
        for key in ("dry_run", "build"):
            if before[key] != self.state[key]:
                print(f"{self.state_path} is of another {key}: all rows are measured again")
                return
        for key in ("rows", "notes", "stuck"):
            self.state[key] = before[key]
        if before["begun"] is not None:
            self.state["stuck"][before["begun"]] = "it did not end within the budget; --fresh tries it again"

    def note(self, text: str) -> None:
        """Add a sentence under the table, for example how something was measured."""
        if text not in self.state["notes"]:
            self.state["notes"].append(text)
            print(f"note: {text}")

    def done(self, name: str) -> dict[str, Any] | None:
        """Return the values of a measured row."""
        found: dict[str, Any] | None = self.state["rows"].get(name)
        return found

    def left_s(self) -> float:
        """Return the seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self.begun)

    def run(self, rows: Sequence[Row]) -> int:
        """Measure the rows that are not measured yet, and return the exit status.

        If the budget is over during a row, the stacks of all threads are printed and the process ends. The
        next run skips that row.
        """
        faulthandler.dump_traceback_later(max(0.1, self.left_s()), exit=True)
        late = 0
        for row in rows:
            if row.name in self.state["rows"] or row.name in self.state["stuck"]:
                continue
            if row.expected_s > self.left_s():
                late += 1
                print(f"left: {row.name}: {self.left_s():.0f} of {self.budget_s:.0f} s are left")
                continue
            self.state["begun"] = row.name
            self.save()
            self._measure(row)
            self.state["begun"] = None
            self.save()
        self.save()
        faulthandler.cancel_dump_traceback_later()
        print(self.table_path.read_text("utf-8"))
        if self.state["failed"]:
            return FAILED
        return ROWS_ARE_LEFT if late else DONE

    def _measure(self, row: Row) -> None:
        begun = time.monotonic()
        try:
            values = row.measure()
        except Skip as reason:
            self.state["skipped"][row.name] = str(reason)
            print(f"skipped: {row.name}: {reason}")
        except Failure as failure:
            self.state["failed"][row.name] = {"reason": str(failure), **failure.values}
            print(f"FAILED: {row.name}: {failure}")
        except Exception as error:  # noqa: BLE001 -- the other rows are still measured
            traceback.print_exc()
            self.state["failed"][row.name] = {"reason": f"{type(error).__name__}: {error}"}
        else:
            took_s = round(time.monotonic() - begun, 2)
            self.state["rows"][row.name] = {**values, "took_s": took_s, "when": now()}
            print(f"done: {row.name} in {took_s:.1f} s")

    def save(self) -> None:
        """Write state and table. A killed run leaves the previous files or the new ones, both complete."""
        for path, text in (
            (self.state_path, json.dumps(self.state, indent=1) + "\n"),
            (self.table_path, self.table()),
        ):
            part = path.with_name(path.name + ".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)

    def table(self) -> str:
        """Return the table as Markdown."""
        facts = self.state["facts"]
        named = ", ".join(f"{key} {value}" for key, value in facts.items() if value)
        lines = [f"## {self.title}", "", f"{named}; build {self.state['build']}.", ""]
        if self.dry_run:
            lines += ["A dry run: shapes are tiny, and its timings mean nothing.", ""]
        titles = ["row", *(column.title for column in self.columns)]
        lines += [" | ".join(titles), " | ".join("---" for _ in titles)]
        lines += [
            " | ".join([name, *(column.of(values) for column in self.columns)])
            for name, values in self.state["rows"].items()
        ]
        lines += [
            "",
            *(f"- FAILED {name}: {entry['reason']}" for name, entry in self.state["failed"].items()),
        ]
        skipped = {**self.state["skipped"], **self.state["stuck"]}
        lines += [f"- skipped {name}: {reason}" for name, reason in skipped.items()]
        lines += [f"- {note}" for note in self.state["notes"]]
        return "\n".join(lines).rstrip() + "\n"


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def is_importable(name: str) -> bool:
    """Return whether the package is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def build_id() -> str:
    """Return twelve digits of the digest of the measured code: the compiled core and the package."""
    spec = importlib.util.find_spec("llaisys")
    if spec is None or spec.origin is None:
        return "without llaisys"
    folder, digest = Path(spec.origin).parent, hashlib.sha256()
    for path in sorted([*folder.glob("_core*.so"), *folder.rglob("*.py")]):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def machine_facts() -> dict[str, str | None]:
    """What a table must name: GPU and driver, CPU, versions of what is compared. None: not there."""
    return {
        "GPU": gpu_name(),
        "CPU": cpu_name(),
        "python": platform.python_version(),
        "llaisys": version_of("llaisys"),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
    }


def gpu_name() -> str | None:
    """Return name, driver and memory from nvidia-smi, otherwise the name that llaisys finds."""
    values = nvidia_smi("name,driver_version,memory.total")
    if values is not None:
        return "{} (driver {}, {})".format(*values)
    if not is_importable("llaisys"):
        return None
    import llaisys

    info = llaisys.cuda_info()
    return info.devices[0].name if info.devices else None


def nvidia_smi(query: str) -> list[str] | None:
    """Return the first GPU's values of `--query-gpu`; None without nvidia-smi, or if it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return [part.strip() for part in ran.stdout.split(",")] if ran.returncode == 0 else None


def cpu_name() -> str | None:
    """Return the CPU's name from /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None
