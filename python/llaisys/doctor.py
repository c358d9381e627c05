"""Reports the hardware, packages and caches that the engine would use. It only reads, and starts nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from llaisys.config import home_folder
from llaisys.engine.host import available_bytes, usable_cpus
from llaisys.engine.worker import available_isas, cuda_info
from llaisys.hub import list_models

# Flags of /proc/cpuinfo that determine which kernels can run.
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512dq",
    "avx512_vnni",
    "avx512_bf16",
)
# Packages whose version affects users.
_PACKAGES = ("numpy", "tokenizers", "huggingface_hub", "jinja2", "fastapi", "uvicorn")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. If `fine` is False, LLAISYS cannot run until it is fixed."""

    subject: str
    detail: str
    fine: bool = True


def examine() -> list[Finding]:
    """Return all findings in the order of the report."""
    return [
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
        _processor(),
        Finding("cores", f"{os.cpu_count()} in the machine, {usable_cpus().n} usable by this process"),
        _instruction_sets(),
        _memory(),
        _cuda(),
        _cache("model cache", home_folder(), "LLAISYS_HOME"),
        _cache("hugging face cache", _hub_cache(), "HF_HOME"),
        *_models(),
    ]


def _version(package: str) -> str:
    """Return a package's version. It can be missing where the wheel was unpacked without its dependencies."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> Finding:
    facts = _proc("cpuinfo")
    have = set(facts.get("flags", "").split())
    features = " ".join(feature for feature in _FEATURES if feature in have)
    return Finding("processor", f"{facts.get('model name', platform.processor() or 'unknown')} [{features}]")


def _instruction_sets() -> Finding:
    try:
        best, *others = available_isas()
    except ImportError as e:
        return Finding("kernels", f"the compiled core cannot be loaded ({e}); run `make build`", fine=False)
    return Finding("kernels", f"{best} will be used" + (f"; also: {', '.join(others)}" if others else ""))


def _memory() -> Finding:
    total = int(_proc("meminfo")["MemTotal"].split()[0]) / 2**20
    return Finding(
        "memory", f"{total:.1f} GiB, {available_bytes() / 2**30:.1f} GiB available to this process"
    )


def _cuda() -> Finding:
    """Report usable GPUs, or why CUDA cannot be used."""
    try:
        info = cuda_info()
    except ImportError:
        return Finding("cuda", "unknown: the compiled core cannot be loaded")
    if info.reason is not None:
        return Finding("cuda", f"cannot be used: {info.reason}; the CPU is used")
    devices = ", ".join(
        f"{device.name} (compute capability {device.capability / 10}, {device.total_bytes / 2**30:.1f} GiB)"
        for device in info.devices
    )
    versions = f"driver for CUDA {info.driver_version}, NVRTC {info.nvrtc_version}"
    return Finding(
        "cuda",
        f"{devices}; {versions}; {', '.join(info.libraries)}; device auto is the first GPU",
    )


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _cache(subject: str, folder: Path, variable: str) -> Finding:
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return Finding(subject, f"{folder} is not writable; set {variable} to another folder", fine=False)
    used, free = sum(_sizes(folder)), shutil.disk_usage(existing).free
    return Finding(subject, f"{folder}, {used / 1e6:.0f} MB in it, {free / 2**30:.1f} GiB free")


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes of each file; links and unreadable or missing folders do not count."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            if not path.is_symlink():
                yield path.stat().st_size


def _models() -> list[Finding]:
    return [
        Finding(
            f"model {row.names[0]}",
            "not pulled yet" if row.path is None else f"{row.n_bytes / 1e6:.1f} MB, {row.path}",
        )
        for row in list_models()
    ]


def _proc(name: str) -> dict[str, str]:
    """Return the `key: value` lines of a /proc file; of equal keys the first (one processor of many)."""
    facts: dict[str, str] = {}
    for line in (Path("/proc") / name).read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts
