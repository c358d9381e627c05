"""Available memory and CPU cores, read from fake /proc and cgroup trees."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from llaisys.engine import host
from llaisys.engine.host import Cpus, available_bytes, mempolicy, usable_cpus
from llaisys.errors import RejectedError

GIB = 2**30


def tree(root: Path, files: dict[str, str]) -> Path:
    defaults = {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n",
        "proc/self/cgroup": "",
    }
    for name, text in {**defaults, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_available_memory_is_the_kernels_estimate(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, {})) == 8 * GIB


def test_cgroup_v2_uses_the_tightest_ancestor(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{3 * GIB}\n",
    }
    assert available_bytes(tree(tmp_path, files)) == 2 * GIB


def test_cgroup_v1_in_a_container_that_sees_its_own_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/docker/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 4}\n",
    }
    assert available_bytes(tree(tmp_path, files)) == GIB - GIB // 4


def test_a_cgroup_above_its_limit_has_no_available_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "200\n",
    }
    assert available_bytes(tree(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            3,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_usable_cores_respect_the_affinity_mask_and_the_cpu_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    files = {"proc/self/cgroup": "2:cpu,cpuacct:/\n0::/\n", **files}
    ids = tuple(range(8)) if cores == 8 else ()
    assert usable_cpus(root=tree(tmp_path, files)) == Cpus(cores, ids)


def test_one_thread_per_physical_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Cores 0 to 3 have the CPUs n and n + 4; the mask leaves out CPU 1, so core 1 is CPU 5.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 4, 5, 6})
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = tree(tmp_path, {siblings.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)})
    assert usable_cpus(root=root) == Cpus(4, (0, 2, 3, 5))
    assert usable_cpus("6,0-0,2-4", root=root) == Cpus(5, (0, 2, 3, 4, 6))


@pytest.mark.parametrize(
    ("bind", "why"),
    [
        ("", "is ''"),
        ("none", "a list of CPUs such as"),
        ("1,,2", "a list of CPUs such as"),
        ("-1", "a list of CPUs such as"),
        ("0-", "a list of CPUs such as"),
        ("999999", "a list of CPUs such as"),
        ("3-1", "3-1 ends before it begins"),
        ("0,7-9", "names CPU 8; this process may use 0, 1, 2, 3, 4, 5, 6, 7"),
        ("0|1|2", "has 3 lists of CPUs, tensor_parallel_size is 2"),
        ("0-1|2-3|", "''|a list of CPUs such as"),
        ("0-1|2", "must be equally long, in ascending order"),
        ("2-3|0-1", "must be equally long, in ascending order"),
        ("0-1|1-2", "must be equally long, in ascending order"),
    ],
)
def test_an_invalid_list_of_cpus_is_rejected(monkeypatch: pytest.MonkeyPatch, bind: str, why: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with pytest.raises(RejectedError, match=why) as caught:
        usable_cpus(bind, 2)
    assert caught.value.param == "cpu_threads_bind"


def test_nobind_does_not_pin_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cpus("nobind", root=tmp_path) == Cpus(8, (), pins=False)


def test_each_rank_has_its_own_cpu_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cpus("0-1,3|4,6-7", 2, tmp_path) == Cpus(6, (0, 1, 3, 4, 6, 7))
    assert usable_cpus("0-3", 2, tmp_path) == Cpus(4, (0, 1, 2, 3))


def test_memory_is_interleaved_over_the_numa_nodes_of_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    # Nodes 0, 2 and 10 have CPUs; node 1 has only memory.
    lists = {0: "0-1,4-5", 1: "", 2: "2-3", 10: "6-7"}
    files = {f"sys/devices/system/node/node{node}/cpulist": f"{text}\n" for node, text in lists.items()}
    root = tree(tmp_path, {**files, "sys/devices/system/node/online": "0-2,10\n"})
    assert usable_cpus(root=root).memory_nodes == (0, 2, 10)
    assert usable_cpus("nobind", root=root).memory_nodes == (0, 2, 10)
    assert usable_cpus("1,7", root=root).memory_nodes == (0, 10)
    assert usable_cpus("0|4", 2, root).memory_nodes == ()  # both in node 0
    assert usable_cpus(root=tree(tmp_path / "one", {})).memory_nodes == ()


def test_set_mempolicy_arguments() -> None:
    """MPOL_INTERLEAVE is 3. The kernel reads one bit fewer than `maxnode`."""
    assert mempolicy((0, 2)) == (3, [0b101], 65)
    assert mempolicy((1, 64)) == (3, [0b10, 0b1], 129)


def test_a_rejected_memory_policy_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    class Libc:
        @staticmethod
        def syscall(*arguments: Any) -> int:
            calls.append((arguments[0].value, arguments[1].value, list(arguments[2]), arguments[3].value))
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(host, "_LIBC", Libc)
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    with caplog.at_level(logging.WARNING):
        host.bind_thread((), (0, 1))
        host.bind_thread((), ())
    assert calls == [(238, 3, [0b11], 65)]
    assert [record.getMessage() for record in caplog.records] == [
        "memory is not interleaved over the NUMA nodes [0, 1]: Operation not permitted"
    ]


def test_this_machine_has_memory_and_cpus() -> None:
    assert available_bytes() > 0
    assert usable_cpus().n >= 1
