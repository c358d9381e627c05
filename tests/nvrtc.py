"""NVIDIA's run-time compiler from the pip package `nvidia-cuda-nvrtc`: compiles kernels without a GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel, from the assembler's report (`ptxas -v`)."""

    registers: int
    static_shared_bytes: int
    spill_bytes: int


class CompileError(Exception):
    """The compiler's log."""


@functools.cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    for folder in (Path(root) / "cu13" / "lib" for root in roots):
        if (folder / "libnvrtc.so.13").exists():
            # NVRTC opens its builtins by bare name without a search path, so they must be loaded before.
            ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.13*"))), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(folder / "libnvrtc.so.13"))
    raise FileNotFoundError("libnvrtc.so.13 is not installed: pip install 'nvidia-cuda-nvrtc==13.0.*'")


def compile_module(source: str, defines: Mapping[str, int], arch: str) -> dict[str, Usage]:
    """Compile a kernel source for `arch` (`sm_90`) to machine code; return the resources of each kernel by
    name.

    Raises CompileError with the compiler's log.
    """
    library = _library()
    options = [
        "--std=c++17",
        "-default-device",
        f"--gpu-architecture={arch}",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
    program = ctypes.c_void_p()
    assert (
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"module.cu", 0, None, None) == 0
    )
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
        log = ctypes.create_string_buffer(size.value)
        assert library.nvrtcGetProgramLog(program, log) == 0
        text = log.value.decode()
        if status != 0:
            raise CompileError(text)
        assert library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        assert size.value > 0, "no machine code"
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return usage_of_log(text)


def usage_of_log(log: str) -> dict[str, Usage]:
    """Parse `ptxas -v`: the resources of each entry function, including the spills of its callees."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.split("'", 1)[0]
        registers = re.search(r"Used (\d+) registers", part)
        assert registers, f"no register count of {name} in {part}"
        static = re.search(r"(\d+) bytes smem", part)
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        found[name] = Usage(int(registers[1]), int(static[1]) if static else 0, spills)
    return found
