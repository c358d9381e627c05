"""The setup reports what is missing and what to do about it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serving import END_S

ROOT = Path(__file__).parents[2]
TOOLS = ("cargo", "rustc", "cc", "python3", "node", "npm")
SHELL = ("bash", "awk", "dirname", "head", "sort", "printf", "env")


def check(
    folder: Path, missing: str | None, script: str = "check-tools.sh", **scripts: str
) -> subprocess.CompletedProcess[str]:
    """Run `script` with a PATH with every tool except `missing`; `scripts` replace tools."""
    for name in (*TOOLS, *SHELL):
        found = sys.executable if name == "python3" else shutil.which(name)
        if name in scripts:
            (folder / name).write_text(f"#!/bin/sh\n{scripts[name]}\n", encoding="utf-8")
            (folder / name).chmod(0o755)
        elif name != missing and found:
            # A tool may look for its parts in its own folder, so it is called where it is.
            (folder / name).write_text(f'#!/bin/sh\nexec "{found}" "$@"\n', encoding="utf-8")
            (folder / name).chmod(0o755)
    command = ["/bin/bash", str(ROOT / "scripts" / script)]
    env = {"PATH": str(folder), "HOME": str(Path.home())}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=END_S)


def test_a_complete_setup_prints_nothing(tmp_path: Path) -> None:
    done = check(tmp_path, None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("tool", "advice"),
    [
        ("cargo", "rustup.rs"),
        ("cc", "build-essential"),
        ("python3", "python3-venv"),
    ],
)
def test_a_missing_tool_is_reported_with_advice(tmp_path: Path, tool: str, advice: str) -> None:
    done = check(tmp_path, tool)
    assert done.returncode == 1
    assert f"{tool} is not installed" in done.stderr
    assert advice in done.stderr


def test_an_old_compiler_is_reported_with_advice(tmp_path: Path) -> None:
    done = check(tmp_path, None, rustc="echo rustc 1.70.0 '(abc 2023-05-31)'")
    assert done.returncode == 1
    assert "1.70.0" in done.stderr
    assert "rustup update" in done.stderr


@pytest.mark.parametrize(
    ("missing", "stand_ins", "why"),
    [
        ("node", {}, "Node.js is not installed"),
        ("npm", {}, "npm is not installed"),
        (None, {"node": "echo v18.19.0"}, "Node.js is 18.19.0, too old"),
        (None, {"node": "echo v20.11.1"}, "Node.js is 20.11.1, too old"),
        (None, {"node": "echo v22.4.0"}, "Node.js is 22.4.0, too old"),
    ],
)
def test_without_node_the_build_continues_and_reports_what_is_missing(
    tmp_path: Path, missing: str | None, stand_ins: dict[str, str], why: str
) -> None:
    done = check(tmp_path, missing, "build-webui.sh", **stand_ins)
    assert done.returncode == 0
    assert why in done.stderr
    assert "the API is served without it" in done.stderr
    assert "install the wheel, or Node.js 20.19" in done.stderr


@pytest.mark.parametrize("version", ["20.19.0", "22.12.0", "24.1.0"])
def test_with_node_the_web_ui_is_built(tmp_path: Path, version: str) -> None:
    calls = tmp_path / "calls"
    done = check(tmp_path, None, "build-webui.sh", node=f"echo v{version}", npm=f'echo "$*" >> {calls}')
    assert (done.returncode, done.stderr) == (0, "")
    assert calls.read_text("utf-8").splitlines() == [
        "--prefix webui ci --silent --no-audit --no-fund",
        "--prefix webui run --silent build",
    ]


def test_a_failing_registry_is_reported_with_advice(tmp_path: Path) -> None:
    done = check(tmp_path, None, "build-webui.sh", npm="exit 1")
    assert done.returncode == 1
    assert "npm config get registry" in done.stderr


def test_a_failing_package_index_is_reported_with_advice(tmp_path: Path) -> None:
    pip_fails = tmp_path / "python"
    pip_fails.write_text('#!/bin/sh\n[ "$1" = - ] && echo numpy && exit 0\nexit 1\n', encoding="utf-8")
    pip_fails.chmod(0o755)
    command = ["/bin/bash", str(ROOT / "scripts" / "install-python.sh"), str(pip_fails)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=END_S)
    assert done.returncode == 1
    assert "PIP_FIND_LINKS" in done.stderr


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=END_S
    )
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"setup", "build", "serve", "check", "test", "lint", "bench", "wheel", "clean"} <= listed
