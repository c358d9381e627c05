"""A machine with a GPU, as far as the wheel can tell: the fake CUDA of the core's tests, which runs the kernels."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

CORE_TESTS = Path(__file__).parents[2] / "crates" / "llaisys-core" / "tests"


@pytest.fixture(scope="session")
def fake_cuda(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process that finds a GPU. Libraries and what they compiled are kept by their sources' digest
    in pytest's cache folder."""
    digest = hashlib.sha256()
    for folder in ("cuda_emu", "fake_cuda"):
        for path in sorted((CORE_TESTS / folder).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(f"fake-cuda-{digest.hexdigest()[:16]}")
    if not (folder / "libcublasLt.so.13").exists():  # the last that is built
        subprocess.run([CORE_TESTS / "fake_cuda" / "build.sh", folder], check=True)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "LLAISYS_CUDA_LIB_DIR": str(folder),
        "LLAISYS_CACHE": str(folder / "cubins"),
    }
