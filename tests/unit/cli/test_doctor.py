"""`llaisys doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from llaisys import doctor
from llaisys.cli.main import main

ISAS = ["avx2", "scalar"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder and a core that runs two instruction sets."""
    monkeypatch.setenv("LLAISYS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "available_isas", lambda: list(ISAS))


def test_the_report_of_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    report = {line[4:].split("  ")[0]: line for line in lines}
    assert {"llaisys", "python", "platform", "processor", "cores", "kernels", "memory"} <= report.keys()
    assert "avx2 will be used; also: scalar" in report["kernels"]
    assert str(tmp_path / "home") in report["model cache"]
    assert "not pulled yet" in report["model smollm2"]
    assert "not supported by this build yet" in report["cuda"]


def test_one_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_isas", lambda: ["scalar"])
    (kernels,) = (finding for finding in doctor.examine() if finding.subject == "kernels")
    assert kernels.detail == "scalar will be used"


def test_a_missing_core_is_reported_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> list[str]:
        raise ImportError("No module named 'llaisys._core'")

    monkeypatch.setattr(doctor, "available_isas", missing)
    assert main(["doctor"]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("!!"))
    assert "make build" in line


def test_a_cache_that_cannot_be_written_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["doctor"]) == 1
    assert "LLAISYS_HOME chooses another" in capsys.readouterr().out
