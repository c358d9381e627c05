"""What this process may use of the machine: memory and cores, cgroup limits included (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken without swapping: the kernel's own estimate, and what each cgroup leaves.

    Page cache that a group can drop (`inactive_file`) counts as free. `root` stands for `/` in tests.
    """
    return max(0, min([_mem_available(root), *_cgroup_rooms(root)]))


def usable_cores(root: Path = _ROOT) -> int:
    """Cores of the affinity mask, at most the CPU quota of the cgroups (rounded up). At least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_cgroup_cores(root)]))


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
