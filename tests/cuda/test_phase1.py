"""benches/gpu: phase 1, the runner of all phases and the bundle, without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benches" / "gpu"
PHASE_1, RUN_ALL = GPU / "phase1_parity.py", GPU / "run_all.py"
DONE, FAILED, LEFT = 0, 1, 3

# A test program with the output of Rust's test harness. Its second test fails in its second case.
PLANTED = """#!/bin/sh
if [ "$2" = --list ]; then printf 'parity::planted::good: test\\nparity::planted::bad: test\\n'; exit; fi
printf 'running 1 test\\ntest %s ... device: emulator\\ncase: norm bf16 1 x 64\\n' "$1"
if [ "$1" = parity::planted::good ]; then printf 'ok\\n\\ntest result: ok. 1 passed; 0 failed;\\n'; exit; fi
printf 'case: norm bf16 2 x 64\\nleft for a GPU: norm, 7 cases\\ntest result: FAILED. 0 passed; 1 failed;\\n'
printf '\\nthread main panicked at a.rs:1:2:\\nnumber 3: 1 instead of 2\\nnote: more\\n' >&2
exit 101
"""


def run(script: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def dry_run(out: Path, tests: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run phase 1 without a GPU, with a test program."""
    return run(PHASE_1, "--dry-run", "--out", out, "--tests", tests, *arguments, **variables)


def state_of(out: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((out / "phase1.json").read_text("utf-8"))
    return state


@pytest.fixture(scope="module")
def gpu_modules() -> dict[str, ModuleType]:
    """The modules of benches/gpu that other scripts import."""
    sys.path.insert(0, str(GPU))
    try:
        import bundle
        import parity_tests
    finally:
        sys.path.remove(str(GPU))
    return {"bundle": bundle, "parity_tests": parity_tests}


@pytest.fixture(scope="module")
def program(gpu_modules: dict[str, ModuleType]) -> Path:
    """The parity tests as `cargo test` builds them."""
    path: Path = gpu_modules["parity_tests"].build("test")
    return path


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    program = tmp_path / "planted"
    program.write_text(PLANTED, "utf-8")
    program.chmod(0o755)
    return program


@pytest.mark.long
def test_a_dry_run_counts_cases_on_the_emulator(program: Path, tmp_path: Path) -> None:
    ran = dry_run(tmp_path, program, "--only", "product::products")
    assert ran.returncode == DONE, ran.stdout + ran.stderr
    (row,) = state_of(tmp_path)["rows"].values()
    # Ten numbers of rows, each with two result types; the shapes of models are left for a GPU.
    assert (row["device"], row["cases"], row["left"]) == ("emulator", 20, 70)
    assert row["by_op"] == [["product", "bf16", 10, 10], ["product", "f16", 10, 10]]
    assert dry_run(tmp_path / "tools", program, "--only", "memcheck product").returncode == DONE
    skipped = state_of(tmp_path / "tools")["skipped"]
    assert skipped == {"memcheck product": "a dry run has no GPU"}
    table = (tmp_path / "phase1.md").read_text("utf-8")
    assert "product | bf16 | 10 | 10 | 0" in table


@pytest.mark.long
def test_the_same_tests_run_on_a_fake_gpu(program: Path, tmp_path: Path, fake_cuda: dict[str, str]) -> None:
    """Only the driver is fake; the code that opens and calls it is not."""
    variables = {"LLAISYS_TEST_DEVICE": "gpu-small", "TMPDIR": fake_cuda["LLAISYS_CUDA_LIB_DIR"]}
    for only in ("product::products", "copy_cells"):
        ran = dry_run(tmp_path, program, "--only", only, **fake_cuda, **variables)
        assert ran.returncode == DONE, ran.stdout + ran.stderr
    rows = state_of(tmp_path)["rows"]
    assert {row["device"] for row in rows.values()} == {"Fake H100"}
    assert [row["cases"] for row in rows.values()] == [20, 3]


def test_a_failing_test_is_in_the_table_and_in_the_exit_status(planted: Path, tmp_path: Path) -> None:
    ran = dry_run(tmp_path, planted)
    assert ran.returncode == FAILED, ran.stdout + ran.stderr
    state = state_of(tmp_path)
    assert list(state["rows"]) == ["planted::good"]
    failed = state["failed"]["planted::bad"]
    assert failed["reason"] == "norm bf16 2 x 64: number 3: 1 instead of 2"
    table = (tmp_path / "phase1.md").read_text("utf-8")
    assert "norm | bf16 | 3 | 2 | 1" in table
    # A failed test runs again, a passed one does not.
    again = dry_run(tmp_path, planted)
    assert again.returncode == FAILED
    assert "bad" in again.stdout
    assert "done: planted::good" not in again.stdout


@pytest.mark.long
def test_an_unknown_device_fails_every_test(program: Path, tmp_path: Path) -> None:
    ran = dry_run(tmp_path, program, "--only", "product::products", LLAISYS_TEST_DEVICE="cloud")
    assert ran.returncode == FAILED, ran.stdout + ran.stderr
    (failed,) = state_of(tmp_path)["failed"].values()
    assert "LLAISYS_TEST_DEVICE=cloud: emulator, gpu or gpu-small" in failed["reason"]


def test_a_test_that_ran_on_the_emulator_fails_outside_a_dry_run(planted: Path, tmp_path: Path) -> None:
    ran = run(PHASE_1, "--out", tmp_path, "--tests", planted, "--only", "::good", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == FAILED, ran.stdout + ran.stderr
    (failed,) = state_of(tmp_path)["failed"].values()
    assert failed["reason"] == "it ran on the emulator"


def test_all_phases_run_in_order_and_continue_after_a_kill(tmp_path: Path) -> None:
    """The second phase kills the runner in its first run."""
    phases = tmp_path / "phases"
    phases.mkdir()
    note = "import os, pathlib, signal, sys\nlog = pathlib.Path(__file__).with_suffix('.runs')\n"
    note += "n = len(log.read_text()) if log.exists() else 0\nlog.write_text('x' * (n + 1))\n"
    kill = f"if n == 0: os.kill(os.getppid(), {int(signal.SIGKILL)})\n"
    out = "(pathlib.Path(sys.argv[sys.argv.index('--out') + 1]) / 'phaseN.md').write_text('table N')\n"
    for number, more in (("1", ""), ("2", kill), ("3", f"sys.exit({LEFT} if n == 0 else {DONE})\n")):
        (phases / f"phase{number}_x.py").write_text(note + out.replace("N", number) + more, "utf-8")
    arguments = ("--out", tmp_path / "out", "--work", tmp_path / "work", "--phases", phases)
    assert run(RUN_ALL, *arguments).returncode == -signal.SIGKILL
    assert run(RUN_ALL, *arguments).returncode == LEFT
    last = run(RUN_ALL, *arguments)
    assert last.returncode == DONE, last.stdout + last.stderr
    runs = {path.name: len(path.read_text("utf-8")) for path in phases.glob("*.runs")}
    assert runs == {"phase1_x.runs": 1, "phase2_x.runs": 2, "phase3_x.runs": 2}
    summary = (tmp_path / "out" / "summary.md").read_text("utf-8")
    assert summary.index("table 1") < summary.index("table 2") < summary.index("table 3")
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as tar:
        assert {"run_all.json", "phase1.md", "phase3_x.log"} <= set(tar.getnames())


@pytest.mark.long
def test_the_runner_runs_phase_1(program: Path, tmp_path: Path) -> None:
    arguments = ["--out", tmp_path / "out", "--work", tmp_path / "work", "--only", "1", "--dry-run"]
    arguments += ["--", "--tests", program, "--only", "copy_cells"]
    ran = run(RUN_ALL, *arguments)
    assert ran.returncode == DONE, ran.stdout + ran.stderr
    assert "copy_cells | bf16 | 3 | 3 | 0" in (tmp_path / "out" / "summary.md").read_text("utf-8")


def test_a_bundle_over_its_limit_is_refused_with_its_sizes(
    gpu_modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    bundle = gpu_modules["bundle"]
    folder, archive = tmp_path / "bundle", tmp_path / "bundle.tar.xz"
    (folder / "inputs").mkdir(parents=True)
    (folder / "inputs" / "model").write_bytes(os.urandom(200_000))
    with pytest.raises(bundle.TooLarge, match=r"0\.2 MB inputs[^$]*0\.2 MB .*, of 0"):
        bundle.pack(folder, archive, 0.1)
    assert not archive.exists()
    assert "0.2 MB inputs" in bundle.pack(folder, archive, 1.0)


def test_a_bundle_that_differs_from_its_manifest_is_not_run(
    gpu_modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    shutil.copy(RUN_ALL, folder)
    (folder / "phase1_x.py").write_text("print('whole')\n", "utf-8")
    gpu_modules["bundle"].write_manifest(folder, "r1")
    arguments = ("--out", tmp_path / "out", "--work", tmp_path / "work")
    assert run(folder / "run_all.py", *arguments).returncode == DONE
    (folder / "phase1_x.py").write_text("print('cut')\n", "utf-8")
    refused = run(folder / "run_all.py", *arguments)
    assert refused.returncode == FAILED
    assert "phase1_x.py differs from the manifest" in refused.stderr


def test_every_parity_test_is_bundled(gpu_modules: dict[str, ModuleType], program: Path) -> None:
    """The bundled program lists a test of each file in `parity/`, and no test of a file outside it."""
    parity = gpu_modules["parity_tests"]
    names: list[str] = parity.list_tests(program)
    modules = {path.stem for path in parity.SOURCES.glob("*.rs")} - {"mod"}
    assert {name.split("::")[1] for name in names} == modules
    assert {name.split("::")[0] for name in names} == {"parity"}
