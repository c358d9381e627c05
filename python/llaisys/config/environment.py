"""What is read from the environment and the installation outside of the settings: folders and versions."""

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
    """Return the variables that a child process needs to start and to know the local time. No setting and no
    secret is among them."""
    needed = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
    return {name: os.environ[name] for name in needed if name in os.environ}


def cuda_library_folders() -> list[Path]:
    """Return the folders that may hold NVRTC, cublasLt and NCCL, in the order of NVIDIA's cuda-pathfinder.

    `LLAISYS_CUDA_LIB_DIR`; the packages that `llaisys[cuda-tp]` names, each layout of them; a conda
    environment; `CUDA_PATH` and `CUDA_HOME`. Imports none of those packages.
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
    """Return the installed version, or `unknown` if LLAISYS runs from a source tree that is not installed."""
    try:
        return version("llaisys")
    except PackageNotFoundError:
        return "unknown"
