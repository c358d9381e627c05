"""The compile gate: every kernel module compiles for every architecture within its declared limits.

It needs no GPU. The emulator's tests verify results (`crates/llaisys-core/tests/cuda/emulator/`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import nvrtc
from llaisys import _core
from nvrtc import CompileError, Usage, compile_module, usage_of_log

# The most shared memory of a block, bytes (CUDA C++ Programming Guide, "Compute capabilities"). 8.6, 8.9 and
# 12.x have the least.
MAX_SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10}
MAX_STATIC_SHARED_BYTES = 48 << 10
REGISTERS_OF_A_BLOCK = 64 << 10

MODULES: list[dict[str, Any]] = json.loads(_core.cuda_kernel_sources())


def faults(kernels: Sequence[dict[str, Any]], used: dict[str, Usage], arch: str) -> list[str]:
    """Return each difference between compiled kernels and their declarations."""
    found = [f"{name} is not declared" for name in used.keys() - {kernel["name"] for kernel in kernels}]
    for kernel in kernels:
        name, usage = kernel["name"], used.get(kernel["name"])
        if usage is None:
            found.append(f"{name} is declared and not in the source")
            continue
        if usage.spill_bytes:
            found.append(f"{name} spills {usage.spill_bytes} bytes")
        if usage.registers > kernel["max_registers"]:
            found.append(f"{name} uses {usage.registers} registers, {kernel['max_registers']} are declared")
        threads = kernel["max_threads"]
        if usage.registers * threads > REGISTERS_OF_A_BLOCK:
            found.append(f"{name}: {threads} threads of {usage.registers} registers do not fit into a block")
        if usage.static_shared_bytes > MAX_STATIC_SHARED_BYTES:
            found.append(f"{name} has {usage.static_shared_bytes} bytes of static shared memory")
        shared = usage.static_shared_bytes + kernel["max_shared_bytes"]
        if shared > MAX_SHARED_BYTES[arch]:
            found.append(f"{name} may use {shared} bytes of shared memory, limit {MAX_SHARED_BYTES[arch]}")
    return [f"{arch}: {fault}" for fault in found]


def compile_everywhere(module: dict[str, Any]) -> list[str]:
    def on(arch: str) -> list[str]:
        return faults(module["kernels"], compile_module(module["source"], module["defines"], arch), arch)

    with ThreadPoolExecutor(2) as pool:
        return [fault for found in pool.map(on, MAX_SHARED_BYTES) for fault in found]


@pytest.mark.parametrize("module", MODULES, ids=[module["module"] for module in MODULES])
def test_a_module_compiles_within_its_limits(module: dict[str, Any], cache: pytest.Cache) -> None:
    """A module that passed is kept in pytest's cache by the digest of all that the result follows from."""
    programs = b"".join(Path(name).read_bytes() for name in (__file__, nvrtc.__file__))
    inputs = json.dumps([module, version("nvidia-cuda-nvrtc")]).encode() + programs
    passed = f"nvrtc/{hashlib.sha256(inputs).hexdigest()}"
    if not cache.get(passed, default=False):
        assert not compile_everywhere(module)
        cache.set(passed, value=True)


def kernel(name: str, **bounds: int) -> dict[str, Any]:
    return {"name": name, "max_threads": 32, "max_registers": 255, "max_shared_bytes": 0} | bounds


# 96 sums that are all live across a barrier.
MANY_SUMS = """
extern "C" __global__ void __launch_bounds__(%s) sums(const float* x, float* y) {
    float sums[96];
    #pragma unroll
    for (int i = 0; i < 96; i++) sums[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; i++) y[(95 - i) * 32 + threadIdx.x] = sums[i] * sums[(i * 7 + 1) %% 96];
}
"""


def faults_of(source: str, *kernels: dict[str, Any]) -> list[str]:
    return compile_everywhere({"source": source, "defines": {}, "kernels": kernels})


def test_a_kernel_over_its_registers_is_reported() -> None:
    found = faults_of(MANY_SUMS % "32", kernel("sums", max_registers=64))
    assert len(found) == len(MAX_SHARED_BYTES), found
    assert all("registers, 64 are declared" in fault for fault in found), found
    assert not faults_of(MANY_SUMS % "32", kernel("sums"))


def test_a_kernel_that_spills_is_reported() -> None:
    # With 1,024 threads each has 64 registers.
    found = faults_of(MANY_SUMS % "1024", kernel("sums"))
    assert [fault for fault in found if "sums spills" in fault], found


def test_shared_memory_over_the_limit_is_reported() -> None:
    text = """extern "C" __global__ void __launch_bounds__(32) f(int* y) {
        __shared__ int x[1024]; x[threadIdx.x] = 1; __syncthreads(); y[0] = x[y[1]]; }"""
    assert not faults_of(text, kernel("f", max_shared_bytes=95 << 10))
    (one,) = faults_of(text, kernel("f", max_shared_bytes=96 << 10))
    assert one.startswith("sm_120: f may use 102400 bytes"), one


def test_differences_between_declarations_and_source_are_reported() -> None:
    text = 'extern "C" __global__ void f() {} extern "C" __global__ void g() {}'
    found = faults_of(text, kernel("f"), kernel("h"))
    assert "sm_80: g is not declared" in found
    assert "sm_80: h is declared and not in the source" in found


def test_a_broken_kernel_fails_with_the_compilers_log() -> None:
    with pytest.raises(CompileError, match="undefined"):
        compile_module('extern "C" __global__ void f() { nothing(); }', {}, "sm_80")


def test_spills_of_stores_and_loads_are_counted() -> None:
    log = (
        "ptxas info    : Compiling entry function 'f' for 'sm_80'\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 128 bytes smem, 360 bytes cmem[0]\n"
    )
    assert usage_of_log(log) == {"f": Usage(registers=32, static_shared_bytes=128, spill_bytes=16)}
