"""Mutation tests of the prefix cache and the scheduler with mutmut, each with only its own tests.

    python scripts/mutants.py [prefix | scheduler]

Works on a copy under target/. Writes benches/results/mutants-python.txt: the number of caught mutants
(including those that never end), and each survivor with the reason why it is acceptable. Reasons are added to
that file by hand, and the next run keeps them. Fails if less than 95 % are caught or a survivor has no
reason.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benches" / "results" / "mutants-python.txt"
CAUGHT_MIN = 0.95
NO_REASON = "NO REASON YET"
# Tests that count executed lines would count mutmut's own lines, so they run on the original code.
PYPROJECT = """\
[tool.pytest.ini_options]
pythonpath = ["tests"]
addopts = "--import-mode=importlib"
asyncio_default_fixture_loop_scope = "function"

[tool.mutmut]
source_paths = ["llaisys"]
also_copy = ["llaisys"]
only_mutate = {mutate}
pytest_add_cli_args = ["-k", "not test_the_cost_of", "-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
track_dependencies = false
use_git_change_detection = false
"""


@dataclass(frozen=True)
class Target:
    """Files of llaisys/engine, and the tests that must fail for their mutants."""

    mutate: tuple[str, ...]
    tests: tuple[str, ...]


TARGETS = {
    "prefix": Target(
        ("prefix_cache.py",),
        ("unit/engine/test_prefix_cache.py", "unit/engine/test_prefix_cache_model.py"),
    ),
    "scheduler": Target(
        ("scheduler.py", "kv_cache_planner.py", "queue_limits.py", "request_queue.py"),
        (
            "unit/engine/test_scheduler.py",
            "unit/engine/test_request_queue.py",
            "unit/engine/test_kv_cache_planner.py",
            "unit/engine/test_kv_cache_manager.py",
            "unit/engine/test_choices.py",
            "sim/test_steps.py",
            "sim/test_simulation.py::test_equal_seeds_give_equal_traces",
        ),
    ),
}


def run(name: str, target: Target) -> dict[str, str]:
    """Return the result of each mutant: killed, survived, timeout, no tests ..."""
    place = ROOT / "target" / "mutants" / name
    shutil.rmtree(place, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", "webui")
    shutil.copytree(ROOT / "python" / "llaisys", place / "llaisys", ignore=skip)
    for folder in ("fakes", "unit/engine", "sim"):
        shutil.copytree(ROOT / "tests" / folder, place / "tests" / folder, ignore=skip)
    settings = PYPROJECT.format(
        mutate=[f"llaisys/engine/{file}" for file in target.mutate],
        tests=[f"tests/{file}" for file in target.tests],
    )
    (place / "pyproject.toml").write_text(settings, "utf-8")
    mutmut = str(Path(sys.executable).parent / "mutmut")
    subprocess.run([mutmut, "run"], cwd=place, check=True)
    listed = subprocess.run(
        [mutmut, "results", "--all", "true"], cwd=place, check=True, capture_output=True, text=True
    )
    return dict(re.findall(r"^\s*(\S+__mutmut_\d+): (.+)$", listed.stdout, re.MULTILINE))


def earlier() -> tuple[dict[str, str], dict[str, str]]:
    """Return the parts of the results file by target, and its reasons by mutant."""
    text = RESULTS.read_text("utf-8") if RESULTS.exists() else ""
    parts = dict(re.findall(r"^== (\w+)\n(.*?)(?=^== |\Z)", text, re.MULTILINE | re.DOTALL))
    return parts, dict(re.findall(r"^(\S+__mutmut_\d+) \S.*?: (.+)$", text, re.MULTILINE))


def report(verdicts: dict[str, str], reasons: dict[str, str]) -> tuple[str, bool]:
    """Return the text of one target, and whether it passes."""
    alive = {name: verdict for name, verdict in verdicts.items() if verdict not in ("killed", "timeout")}
    caught = 1 - len(alive) / len(verdicts)
    lines = [f"{len(verdicts)} mutants, {len(alive)} survive, {100 * caught:.1f} % caught"]
    lines += [f"{name} ({alive[name]}): {reasons.get(name, NO_REASON)}" for name in sorted(alive)]
    return "\n".join(lines) + "\n", caught >= CAUGHT_MIN and NO_REASON not in "\n".join(lines)


def main() -> None:
    """Run the named targets, or all."""
    parts, reasons = earlier()
    good = True
    for name in sys.argv[1:] or TARGETS:
        parts[name], fine = report(run(name, TARGETS[name]), reasons)
        good &= fine
        print(f"== {name}\n{parts[name]}")
    RESULTS.write_text("\n".join(f"== {name}\n{text.rstrip()}\n" for name, text in parts.items()), "utf-8")
    if not good:
        sys.exit(f"less than {100 * CAUGHT_MIN:.0f} % are caught, or a survivor has no reason: {RESULTS}")


if __name__ == "__main__":
    main()
