"""CUDA availability and its errors, on a machine with or without CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import llaisys
from golden import FOLDER
from llaisys import _core
from llaisys.config import Config, cuda_library_folders
from llaisys.engine import start
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import CudaDevice, CudaInfo

VARIABLES = ("LLAISYS_CUDA_LIB_DIR", "CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME")


def test_a_missing_driver_is_a_reason_not_an_error() -> None:
    info = json.loads(_core.cuda_info([], "libcuda-missing.so.1"))
    assert list(info) == ["reason"]
    assert "no NVIDIA driver" in info["reason"]
    assert "libcuda-missing.so.1" in info["reason"]


def test_this_machine_has_either_gpus_or_a_reason() -> None:
    info = llaisys.cuda_info()
    assert info.usable == (info.reason is None) == bool(info.devices) == bool(info.libraries)


def test_importing_the_package_does_not_look_for_a_driver() -> None:
    script = (
        "import llaisys, llaisys.llm, llaisys.engine.worker, llaisys._core\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcuda' not in maps and 'libnvrtc' not in maps"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(llaisys.__file__).parents[1])


def test_an_unusable_device_is_rejected_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "cuda_info", lambda: CudaInfo(reason="the driver knows CUDA 12.8"))
    with pytest.raises(UnsupportedError, match=r"the driver knows CUDA 12\.8") as caught:
        start.check_gpu(0)
    assert caught.value.param == "device"
    device = CudaDevice("NVIDIA H100", 90, 80 << 30)
    monkeypatch.setattr(start, "cuda_info", lambda: CudaInfo(None, "13.0", "13.0", (device,), ("/x",)))
    assert start.check_gpu(0) == device
    with pytest.raises(UnsupportedError, match="cuda_device is 1, allowed are 0 to 0 on") as caught:
        start.check_gpu(1)
    assert caught.value.param == "cuda_device"


def test_libraries_are_searched_in_the_configured_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    site = tmp_path / "site"
    for part in ("nvidia/cu13/lib", "nvidia/cublas/lib", "nvidia/nccl/lib"):
        (site / part).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    packages = [site / "nvidia/cu13/lib", site / "nvidia/cublas/lib", site / "nvidia/nccl/lib"]
    found = cuda_library_folders()
    assert found[:3] == packages
    for name, variable in (("own", VARIABLES[0]), ("conda/lib", VARIABLES[1]), ("cuda/lib64", VARIABLES[3])):
        (tmp_path / name).mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / name.partition("/")[0]))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "nowhere"))
    found = cuda_library_folders()
    assert found[:4] == [tmp_path / "own", *packages]
    assert found[-2:] == [tmp_path / "conda/lib", tmp_path / "cuda/lib64"]


def test_gpu_memory_utilization_is_a_setting() -> None:
    assert Config().gpu_memory_utilization == 0.9
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        Config(gpu_memory_utilization=1.5)


def opened(n_cells: int | None, gpu: _core.Gpu | None) -> _core.Context:
    """Open a small model, on a GPU or on the CPU."""
    return _core.Context(
        str(FOLDER), n_cells=n_cells, n_seq_max=2, n_batch=8, max_model_len=32, n_threads=1, gpu=gpu
    )


def test_a_context_on_a_missing_gpu_is_rejected_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r'device "cuda" cannot be used: no NVIDIA driver'):
        opened(64, _core.Gpu([], driver="libcuda-missing.so.1"))
    with pytest.raises(RejectedError, match="n_cells is None, which needs a gpu"):
        opened(None, None)


def test_gpu_settings_out_of_bounds_are_rejected() -> None:
    with pytest.raises(RejectedError, match=r"memory_share is 1\.5"):
        _core.Gpu([], memory_share=1.5)
    with pytest.raises(RejectedError, match="ordinal is -1"):
        _core.Gpu([], ordinal=-1)
