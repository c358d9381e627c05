"""What this process may use of the machine: memory, CPUs, NUMA nodes, cgroup limits included (Linux)."""

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
# Numbers of set_mempolicy, which the C library does not wrap.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_LIBC = ctypes.CDLL(None, use_errno=True)

log = logging.getLogger(__name__)


def available_bytes(root: Path = _ROOT) -> int:
    """Memory that can be taken without swapping: the kernel's own estimate, and what each cgroup leaves.

    Page cache that a group can drop (`inactive_file`) counts as free. `root` stands for `/` in tests.
    """
    return max(0, min([_mem_available(root), *_cgroup_rooms(root)]))


@dataclass(frozen=True, slots=True)
class Cpus:
    """Where to compute: on `n` threads, kept to the CPUs `ids` (empty: wherever the system puts them).

    `pins`: a thread that has a CPU to itself stays there. `memory_nodes`: the NUMA nodes that memory is
    spread over, if the CPUs lie in several.
    """

    n: int
    ids: tuple[int, ...] = ()
    pins: bool = True
    memory_nodes: tuple[int, ...] = ()


def usable_cpus(bind: str = "auto", n_ranks: int = 1, root: Path = _ROOT) -> Cpus:
    """CPUs to compute on, of those in the affinity mask; `bind` is the setting `cpu_threads_bind`.

    "auto": one of each physical core (the threads of a core share its arithmetic units), and not bound if a
    CPU quota of the cgroups, rounded up, is smaller: then as many threads as that. "nobind": as many, where
    the system puts them. A list ("0-3,8"): these. A list for each of `n_ranks` ("0-3|4-7"): these.
    `root` stands for `/` in tests. Raises RejectedError: a list that is none, or that names a CPU outside the
    mask; lists that are not one for each rank.
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


def place(cpu_ids: Sequence[int], memory_nodes: Sequence[int]) -> None:
    """Keeps this thread, and those it starts, to CPUs, and spreads what they touch first over NUMA nodes.

    Nothing happens for what is empty. With memory on all nodes each thread reads weights at the speed of all,
    wherever it is. A refusal costs only speed: containers forbid the call (EPERM), kernels may lack it.
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
        log.warning("memory is not spread over the NUMA nodes %s: %s", list(nodes), why)


def mempolicy(nodes: Sequence[int]) -> tuple[int, list[int], int]:
    """What set_mempolicy(2) takes: the mode, the bits of the nodes in words of 64, and how many bits to read.

    The kernel reads one bit less than it is told.
    """
    bits = sum(1 << node for node in set(nodes))
    n_words = bits.bit_length() // 64 + 1
    return _MPOL_INTERLEAVE, [bits >> 64 * i & (1 << 64) - 1 for i in range(n_words)], 64 * n_words + 1


def _memory_nodes(cpus: Collection[int], root: Path) -> tuple[int, ...]:
    """The NUMA nodes that these CPUs lie in; nothing if it is one, or the system does not tell."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = {int(folder.name[4:]): _text(folder / "cpulist").strip() for folder in folders}
    nodes = [node for node, text in lists.items() if text and not _expand(text).isdisjoint(cpus)]
    return tuple(sorted(nodes)) if len(nodes) > 1 else ()


def _one_of_each_core(allowed: list[int], root: Path) -> tuple[int, ...]:
    """The first of the allowed CPUs of each core; all where the system does not tell."""
    first: dict[str, int] = {}
    for cpu in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _text(topology / "thread_siblings_list").strip() or str(cpu)
        first.setdefault(siblings, cpu)
    return tuple(first.values())


def _rank_lists(text: str, n_ranks: int, allowed: list[int]) -> tuple[int, ...]:
    """The CPUs of one list, or of one for each rank: the core gives each rank an equal run of them."""
    lists = [_cpu_list(part, allowed) for part in text.split("|")]
    ids = [cpu for part in lists for cpu in part]
    if len(lists) == 1:
        return tuple(ids)
    if len(lists) != n_ranks:
        raise RejectedError(
            f"cpu_threads_bind has {len(lists)} lists of CPUs, tensor_parallel_size is {n_ranks}: "
            "give one list for all ranks, or one for each",
            param="cpu_threads_bind",
        )
    if len(ids) != n_ranks * len(lists[0]) or ids != sorted(set(ids)):
        raise RejectedError(
            f"cpu_threads_bind is {text!r}: the ranks' lists are of one length, each above the one before it",
            param="cpu_threads_bind",
        )
    return tuple(ids)


def _cpu_list(text: str, allowed: list[int]) -> tuple[int, ...]:
    """The CPUs of a list of numbers and ranges: "0-3,8"."""
    if re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text, re.ASCII) is None:
        raise RejectedError(
            f"cpu_threads_bind is {text!r}: it is auto, nobind, or a list of CPUs such as 0-3,8",
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
    """The numbers of a list of numbers and ranges."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise RejectedError(f"cpu_threads_bind: {part} ends before it begins", param="cpu_threads_bind")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


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
