"""Fixtures for a machine with a fake GPU: the fake CUDA of the core's tests runs the kernels."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving import environment

CORE_TESTS = Path(__file__).parents[2] / "crates" / "llaisys-core" / "tests"
FAKE_CUDA = CORE_TESTS / "cuda_driver" / "fake"


@pytest.fixture(scope="session")
def fake_cuda(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process that finds a GPU.

    The fake libraries, and the modules that they compile, are cached in pytest's cache folder by the digest
    of their sources.
    """
    digest = hashlib.sha256()
    for folder in (CORE_TESTS / "cuda" / "emulator", FAKE_CUDA):
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(f"fake-cuda-{digest.hexdigest()[:16]}")
    if not (folder / "libcublasLt.so.13").exists():  # built last
        subprocess.run([FAKE_CUDA / "build.sh", folder], check=True)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "LLAISYS_CUDA_LIB_DIR": str(folder),
        "LLAISYS_HOME": str(folder),
        "FAKE_CUDA_MEMORY_MB": "256",
    }


@pytest.fixture
def generate(fake_cuda: dict[str, str]) -> Callable[..., Any]:
    """A function that runs `generate_process.py` with the GPU and an order, and returns its report."""

    def run(order: dict[str, Any], **extra: str) -> Any:
        command = [sys.executable, str(Path(__file__).parent / "generate_process.py"), json.dumps(order)]
        env = environment(**{**fake_cuda, **extra})
        ran = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    return run
