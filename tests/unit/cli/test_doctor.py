"""`llaisys doctor`."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from huggingface_hub import constants

from llaisys import doctor
from llaisys.cli.main import main
from llaisys.model_info import CudaDevice, CudaInfo

ISAS = ["avx2", "scalar"]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an empty cache folder, a core with two instruction sets, and no GPU."""
    monkeypatch.setenv("LLAISYS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(doctor, "available_isas", lambda: list(ISAS))
    monkeypatch.setattr(doctor, "cuda_info", lambda: CudaInfo(reason="no NVIDIA driver: not here"))


def test_the_report_of_a_healthy_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok  ") for line in lines)
    report = {line[4:].split("  ")[0]: line for line in lines}
    assert {"llaisys", "python", "platform", "processor", "cores", "kernels", "memory"} <= report.keys()
    assert "avx2 will be used; also: scalar" in report["kernels"]
    assert str(tmp_path / "home") in report["model cache"]
    assert "not pulled yet" in report["model smollm2"]
    assert "cannot be used: no NVIDIA driver" in report["cuda"]
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


def test_processor_features_are_those_that_the_core_detects() -> None:
    source = Path(__file__).parents[3] / "crates/llaisys-core/src/ops/cpu/isa/mod.rs"
    detected = re.findall(r'is_x86_feature_detected!\("(\w+)"\)', source.read_text("utf-8"))
    kernel_names = {"avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni"}
    assert {kernel_names.get(name, name) for name in detected} == set(doctor._FEATURES)


def test_unusable_cuda_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cuda_info", lambda: CudaInfo(reason="the driver knows CUDA 12.8"))
    found = doctor._cuda()
    assert found.fine
    assert found.detail == "cannot be used: the driver knows CUDA 12.8; the CPU is used"


def test_a_gpu_is_shown_with_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("NVIDIA H100", 90, 80 << 30)
    info = CudaInfo(None, "13.0", "13.1", (device,), ("/x/libnvrtc.so.13",))
    monkeypatch.setattr(doctor, "cuda_info", lambda: info)
    detail = doctor._cuda().detail
    for part in ("NVIDIA H100 (compute capability 9.0, 80.0 GiB)", "CUDA 13.0", "NVRTC 13.1", "/x/libnvrtc"):
        assert part in detail


def test_a_single_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "set LLAISYS_HOME to another folder" in capsys.readouterr().out


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel can be unpacked on a machine that lacks a dependency (`make gpu-bundle`)."""
    monkeypatch.setattr(doctor, "_PACKAGES", ("numpy", "llaisys-no-such-package"))
    assert main(["doctor"]) == 0
    assert "llaisys-no-such-package not installed" in capsys.readouterr().out
