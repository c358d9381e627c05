"""Reads folders and versions from the environment and the installation, outside of the settings."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def home_folder() -> Path:
    """Return the folder of pulled models: `LLAISYS_HOME`, `$XDG_CACHE_HOME/llaisys` or `~/.cache/llaisys`."""
    home = os.environ.get("LLAISYS_HOME")
    if home:
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "llaisys"


def bare_environment() -> dict[str, str]:
    """Return the environment variables that a child process needs, without settings and secrets."""
    needed = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
    return {name: os.environ[name] for name in needed if name in os.environ}


def cuda_library_folders() -> list[Path]:
    """Return the folders that may contain NVRTC, cublasLt and NCCL, in the order of NVIDIA's cuda-pathfinder.

    These are `LLAISYS_CUDA_LIB_DIR`, the packages of `llaisys[cuda-tp]` in each layout, a conda environment,
    `CUDA_PATH` and `CUDA_HOME`. The packages are not imported.
    """
    named = os.environ.get("LLAISYS_CUDA_LIB_DIR")
    folders = [Path(named).expanduser()] if named else []
    spec = find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        folders += [Path(place, part, "lib") for part in ("cu13", "cuda_nvrtc", "cublas", "nccl")]
    for variable, part in (("CONDA_PREFIX", "lib"), ("CUDA_PATH", "lib64"), ("CUDA_HOME", "lib64")):
        if root := os.environ.get(variable):
            folders.append(Path(root, part))
    return [folder.absolute() for folder in folders if folder.is_dir()]


def cubin_folder() -> Path:
    """Return the folder of compiled CUDA kernels, which later starts reuse."""
    return home_folder() / "cubin"


def package_version() -> str:
    """Return the installed version, or `unknown` for a source tree that is not installed."""
    try:
        return version("llaisys")
    except PackageNotFoundError:
        return "unknown"
