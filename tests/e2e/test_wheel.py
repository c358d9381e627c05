"""The wheel of `make wheel` in an environment without this source tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from serving import environment

ROOT = Path(__file__).parents[2]
# It compiles the core for an older C library than `make build`, which takes minutes after each change.
pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(900)]

GENERATE = """
import json
import llaisys
from llaisys import LLM, SamplingParams
with LLM("smollm2", num_kv_cells=64) as llm:
    (out,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=6))
print(json.dumps([llaisys.__file__, out.outputs[0].text]))
"""


def run(*command: str, cwd: Path) -> str:
    """Run a command in a folder and an environment without the source tree; return its stdout."""
    bare = {k: v for k, v in environment().items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    done = subprocess.run(
        [ROOT / "scripts" / "wheel.sh", Path(sys.prefix) / "bin"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ROOT / done.stdout.strip()


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "requirements.lock"),
    )
    run(str(python), *pip, str(wheel), cwd=folder)
    return python


def test_one_wheel_for_every_python_and_every_linux_since_2018(wheel: Path) -> None:
    assert wheel.name.endswith("-cp310-abi3-manylinux_2_28_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        core = archive.read("llaisys/_core.abi3.so")
    assert "llaisys/webui/index.html" in names
    assert "llaisys/webui/index.html.gz" in names
    assert "llaisys/webui/licenses.md" in names
    assert any(name.startswith("llaisys/webui/assets/") for name in names)
    assert any(name.startswith("llaisys/webui/assets/KaTeX_") for name in names)
    assert not any("__pycache__" in name or "/tests/" in name for name in names)
    newest = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", core))
    assert newest <= 28, f"the core asks for glibc 2.{newest}"


def test_the_installed_wheel_generates(python: Path, tmp_path: Path) -> None:
    file, text = json.loads(run(str(python), "-c", GENERATE, cwd=tmp_path).splitlines()[-1])
    assert Path(file).is_relative_to(python.parents[1])
    assert text.startswith(" Paris")


def test_the_doctor_finds_no_problem(python: Path, tmp_path: Path) -> None:
    findings = json.loads(run(str(python.parent / "llaisys"), "doctor", "--json", cwd=tmp_path))
    assert all(finding["fine"] for finding in findings)
    report = {finding["subject"]: finding["detail"] for finding in findings}
    assert str(python.parent) in report["python"]
    assert os.sep in report["model smollm2"]
