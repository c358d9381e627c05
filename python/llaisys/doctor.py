"""Looks at the machine the way the engine will see it. Reads only; starts nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from llaisys.config import home_folder
from llaisys.engine.machine import available_bytes, usable_cores
from llaisys.engine.worker import available_isas
from llaisys.hub import list_models

# Flags of /proc/cpuinfo that decide which kernels can run.
_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; not `fine` means that LLAISYS cannot run until it is mended."""

    subject: str
    detail: str
    fine: bool = True


def examine() -> list[Finding]:
    """The findings, in the order in which a person would ask."""
    return [
        Finding("python", f"{platform.python_version()} ({sys.executable})"),
        Finding("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
        _processor(),
        Finding("cores", f"{os.cpu_count()} in the machine, {usable_cores()} usable by this process"),
        _instruction_sets(),
        _memory(),
        _cache(),
        *_models(),
        Finding("cuda", "not supported by this build yet"),
    ]


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


def _cache() -> Finding:
    home = home_folder()
    existing = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Finding("model cache", f"{home} cannot be written; LLAISYS_HOME chooses another", fine=False)
    return Finding("model cache", f"{home}, {shutil.disk_usage(existing).free / 2**30:.1f} GiB free")


def _models() -> list[Finding]:
    return [
        Finding(f"model {row.names[0]}", str(row.path) if row.path is not None else "not pulled yet")
        for row in list_models()
    ]


def _proc(name: str) -> dict[str, str]:
    """The `key: value` lines of a file of /proc; of equal keys the first (one processor of many)."""
    facts: dict[str, str] = {}
    for line in (Path("/proc") / name).read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    return facts
