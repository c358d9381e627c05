"""Finds the memory, CPUs and NUMA nodes that this process may use, within cgroup limits (Linux)."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llaisys.errors import RejectedError

_ROOT = Path("/")
_MPOL_INTERLEAVE = 3
# System call numbers of set_mempolicy, which the C library does not wrap.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_LIBC = ctypes.CDLL(None, use_errno=True)

log = logging.getLogger(__name__)


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes available without swapping: the kernel's estimate, within the limit of each cgroup.

    Page cache that a cgroup can drop (`inactive_file`) counts as free. `root` stands for `/` in tests.
    """
    return max(0, min([_mem_available(root), *_cgroup_free_bytes(root)]))


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs to compute on.

    - `n`: number of threads. `ids`: the CPUs that they are bound to. Without ids they are not bound.
    - `pins`: pin each thread to one CPU, where there are enough CPUs.
    - `memory_nodes`: the NUMA nodes to interleave memory over, if the CPUs are on several nodes.
    """

    n: int
    ids: tuple[int, ...] = ()
    pins: bool = True
    memory_nodes: tuple[int, ...] = ()


def usable_cpus(bind: str = "auto", n_ranks: int = 1, root: Path = _ROOT) -> Cpus:
    """Return the CPUs of the affinity mask to compute on. `bind` is the setting `cpu_threads_bind`.

    - "auto": one CPU of each physical core, because the hardware threads of a core share its arithmetic
      units. If a CPU quota of the cgroups, rounded up, is smaller: that many threads, not bound.
    - "nobind": the same number of threads, not bound.
    - A list ("0-3,8"), or one for each of `n_ranks` ("0-3|4-7"): these CPUs.

    `root` stands for `/` in tests. Raises RejectedError for an invalid list, a CPU outside the mask, or
    lists that do not match the ranks.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if bind not in ("auto", "nobind"):
        ids = _rank_lists(bind, n_ranks, allowed)
        return Cpus(len(ids), ids, memory_nodes=_memory_nodes(ids, root))
    cores = _one_of_each_core(allowed, root)
    n = max(1, min([len(cores), *_cgroup_cores(root)]))
    binds = bind == "auto"
    ids = cores if binds and n == len(cores) else ()
    return Cpus(n, ids, binds, _memory_nodes(ids or allowed, root))


def bind_thread(cpu_ids: Sequence[int], memory_nodes: Sequence[int]) -> None:
    """Bind this thread and those it starts to CPUs, and interleave their memory over NUMA nodes.

    An empty argument has no effect. With memory on all nodes, every thread reads weights at the combined
    bandwidth of the nodes. A failure costs only speed: containers may forbid the call (EPERM), and a kernel
    may lack it.
    """
    if cpu_ids:
        os.sched_setaffinity(0, cpu_ids)
    number = _SET_MEMPOLICY.get(platform.machine())
    if memory_nodes and number is not None:
        _interleave(number, memory_nodes)


def _interleave(number: int, nodes: Sequence[int]) -> None:
    mode, mask, n_bits = mempolicy(nodes)
    words = (ctypes.c_uint64 * len(mask))(*mask)
    if _LIBC.syscall(ctypes.c_long(number), ctypes.c_int(mode), words, ctypes.c_ulong(n_bits)) != 0:
        why = os.strerror(ctypes.get_errno())
        log.warning("memory is not interleaved over the NUMA nodes %s: %s", list(nodes), why)


def mempolicy(nodes: Sequence[int]) -> tuple[int, list[int], int]:
    """Return the arguments of set_mempolicy(2): mode, node bits in 64-bit words, and the number of bits.

    The kernel reads one bit less than that number.
    """
    bits = sum(1 << node for node in set(nodes))
    n_words = bits.bit_length() // 64 + 1
    return _MPOL_INTERLEAVE, [bits >> 64 * i & (1 << 64) - 1 for i in range(n_words)], 64 * n_words + 1


def _memory_nodes(cpus: Collection[int], root: Path) -> tuple[int, ...]:
    """Return the NUMA nodes of these CPUs. Empty for a single node, or if the system reports no nodes."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = {int(folder.name[4:]): _text(folder / "cpulist").strip() for folder in folders}
    nodes = [node for node, text in lists.items() if text and not _expand(text).isdisjoint(cpus)]
    return tuple(sorted(nodes)) if len(nodes) > 1 else ()


def _one_of_each_core(allowed: list[int], root: Path) -> tuple[int, ...]:
    """Return the first allowed CPU of each core; all CPUs if the system does not report cores."""
    first: dict[str, int] = {}
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _text(topology / "thread_siblings_list").strip() or str(cpu)
        first.setdefault(siblings, cpu)
    return tuple(first.values())


def _rank_lists(text: str, n_ranks: int, allowed: list[int]) -> tuple[int, ...]:
    """Return the CPUs of one list, or of one list per rank. The core gives each rank an equal part."""
    lists = [_cpu_list(part, allowed) for part in text.split("|")]
    ids = [cpu for part in lists for cpu in part]
    if len(lists) == 1:
        return tuple(ids)
    if len(lists) != n_ranks:
        raise RejectedError(
            f"cpu_threads_bind has {len(lists)} lists of CPUs, tensor_parallel_size is {n_ranks}: "
            "set one list for all ranks, or one for each rank",
            param="cpu_threads_bind",
        )
    if len(ids) != n_ranks * len(lists[0]) or ids != sorted(set(ids)):
        raise RejectedError(
            f"cpu_threads_bind is {text!r}: the lists of all ranks must be equally long, in ascending order",
            param="cpu_threads_bind",
        )
    return tuple(ids)


def _cpu_list(text: str, allowed: list[int]) -> tuple[int, ...]:
    """Return the CPUs of a list of numbers and ranges such as "0-3,8"."""
    if re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text, re.ASCII) is None:
        raise RejectedError(
            f"cpu_threads_bind is {text!r}: allowed are auto, nobind, or a list of CPUs such as 0-3,8",
            param="cpu_threads_bind",
        )
    wanted = _expand(text)
    outside = wanted.difference(allowed)
    if outside:
        raise RejectedError(
            f"cpu_threads_bind names CPU {min(outside)}; this process may use {', '.join(map(str, allowed))}",
            param="cpu_threads_bind",
        )
    return tuple(sorted(wanted))


def _expand(text: str) -> set[int]:
    """Return the numbers of a list of numbers and ranges."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise RejectedError(
                f"cpu_threads_bind: the range {part} ends before it begins", param="cpu_threads_bind"
            )
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _cgroup_free_bytes(root: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup that has a limit."""
    for folder in _groups(root, ""):
        yield from _free_bytes(folder, "memory.max", "memory.current", "inactive_file")
    for folder in _groups(root, "memory"):
        yield from _free_bytes(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        )


def _free_bytes(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    limit, usage = _number(folder / limit_name), _number(folder / usage_name)
    if limit is not None and usage is not None:
        stat = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        yield limit - usage + int(stat.get(cache_name, "0"))


def _cgroup_cores(root: Path) -> Iterator[int]:
    """Yield the cores of each cgroup that has a CPU quota, rounded up."""
    for folder in _groups(root, ""):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            yield -(-int(quota) // int(period))
    for folder in _groups(root, "cpu"):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us is not None and quota_us > 0:
            yield -(-quota_us // period_us)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors.

    `controller` names a controller of cgroup version 1. "" stands for version 2.
    """
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
    """Return a file's text; "" if the kernel or the container hides the file."""
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
