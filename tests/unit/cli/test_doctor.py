"""`llaisys doctor`."""

from __future__ import annotations

import ctypes
import json
import re
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from llaisys import doctor
from llaisys.cli.main import main
from llaisys.doctor import _cuda

ISAS = ["avx2", "scalar"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder and a core that runs two instruction sets."""
    monkeypatch.setenv("LLAISYS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
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
    assert "computes on the CPU only" in report["cuda"]
    assert {"packages", "hugging face cache"} <= report.keys()
    assert f"tokenizers {metadata.version('tokenizers')}" in report["packages"]


def test_the_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "x").write_bytes(bytes(3_000_000))
    assert main(["doctor", "--json"]) == 0
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["kernels"] == {
        "subject": "kernels",
        "detail": "avx2 will be used; also: scalar",
        "fine": True,
    }
    assert ", 3 MB in it, " in found["model cache"]["detail"]


def test_the_processor_s_features_are_those_that_the_core_asks_for() -> None:
    source = Path(__file__).parents[3] / "crates/llaisys-core/src/ops/cpu/isa/mod.rs"
    asked = re.findall(r'is_x86_feature_detected!\("(\w+)"\)', source.read_text("utf-8"))
    kernel_names = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni"}
    assert {kernel_names.get(name, name) for name in asked} == set(doctor._FEATURES)


def test_cuda_says_which_file_it_looked_for() -> None:
    assert "no driver: the loader finds no libnothere.so.1, and there is" in _cuda("libnothere.so.1").detail


@pytest.mark.parametrize(
    ("status", "words"), [(0, r"driver for CUDA 12\.8 \(libcuda"), (999, "cuDriverGetVersion answers 999")]
)
def test_a_driver_is_asked_for_its_version(status: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(version: Any) -> int:
        version._obj.value = 12080
        return status

    driver = types.SimpleNamespace(cuDriverGetVersion=answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    assert re.search(words, _cuda("libcuda.so.1").detail)


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
