"""What this process may use of the machine: memory and CPUs, cgroup limits included (Linux)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llaisys.errors import RejectedError

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken without swapping: the kernel's own estimate, and what each cgroup leaves.

    Page cache that a group can drop (`inactive_file`) counts as free. `root` stands for `/` in tests.
    """
    return max(0, min([_mem_available(root), *_cgroup_rooms(root)]))


@dataclass(frozen=True, slots=True)
class Cpus:
    """Where to compute: on `n` threads, kept to the CPUs `ids` (empty: wherever the system puts them)."""

    n: int
    ids: tuple[int, ...] = ()


def usable_cpus(bind: str = "auto", root: Path = _ROOT) -> Cpus:
    """CPUs to compute on, of those in the affinity mask; `bind` is the setting `cpu_threads_bind`.

    "auto": one of each physical core (the threads of a core share its arithmetic units), and not bound if a
    CPU quota of the cgroups, rounded up, is smaller: then as many threads as that. A list ("0-3,8"): these.
    `root` stands for `/` in tests. Raises RejectedError: a list that is none, or that names a CPU outside the
    mask.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if bind != "auto":
        ids = _cpu_list(bind, allowed)
        return Cpus(len(ids), ids)
    ids = _one_of_each_core(allowed, root)
    n = max(1, min([len(ids), *_cgroup_cores(root)]))
    return Cpus(n, ids if n == len(ids) else ())


def _one_of_each_core(allowed: list[int], root: Path) -> tuple[int, ...]:
    """The first of the allowed CPUs of each core; all where the system does not tell."""
    first: dict[str, int] = {}
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _text(topology / "thread_siblings_list").strip() or str(cpu)
        first.setdefault(siblings, cpu)
    return tuple(first.values())


def _cpu_list(text: str, allowed: list[int]) -> tuple[int, ...]:
    """The CPUs of a list of numbers and ranges: "0-3,8"."""
    if re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text, re.ASCII) is None:
        raise RejectedError(
            f"cpu_threads_bind is {text!r}: it is auto, or a list of CPUs such as 0-3,8",
            param="cpu_threads_bind",
        )
    wanted: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus = range(int(first), int(last or first) + 1)
        if not cpus:
            raise RejectedError(f"cpu_threads_bind: {part} ends before it begins", param="cpu_threads_bind")
        wanted.update(cpus)
    outside = wanted.difference(allowed)
    if outside:
        raise RejectedError(
            f"cpu_threads_bind names CPU {min(outside)}; this process may use {', '.join(map(str, allowed))}",
            param="cpu_threads_bind",
        )
    return tuple(sorted(wanted))


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Bytes that each group with a limit has left."""
    for folder in _groups(root, ""):
        yield from _room(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _groups(root, "memory"):
        yield from _room(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is not None and usage is not None:
        stat = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        yield limit - usage + int(stat.get(cache_name, "0"))


def _cgroup_cores(root: Path) -> Iterator[int]:
    """Cores that each group with a quota grants, rounded up."""
    for folder in _groups(root, ""):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            yield -(-int(quota) // int(period))
    for folder in _groups(root, "cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us is not None and quota_us > 0:
            yield -(-quota_us // period_us)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and its ancestors: version 1 by controller, version 2 by ""."""
    base = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folder = Path(path.lstrip("/"))
            for group in (folder, *folder.parents):
                yield base / group


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str:
    """The file's text; "" where the kernel or the container does not show it."""
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
