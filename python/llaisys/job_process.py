"""The entry point of a worker process, which runs jobs for a JobPool one after the other, each within limits.

A job that exceeds its CPU time ends the process (SIGPROF), even in C code that never returns. A job that
exceeds its memory gets a MemoryError, or a library aborts the process. Jobs and their error messages may
contain prompts, so the process logs nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from llaisys.errors import LlaisysError
from llaisys.ipc import FRAME_BYTES_MAX, Channel

# The type of the table JOBS of a module: job name -> function of plain values that returns a plain value.
Jobs: TypeAlias = Mapping[str, Callable[..., Any]]

# `trim` runs after jobs with more bytes, because the C library may keep hundreds of MiB of free memory.
TRIM_ABOVE_BYTES = 64 << 10
_PAGE_BYTES = resource.getpagesize()
# The prefix of a value that is encoded as JSON: a byte that no msgpack value begins with.
_JSON = b"\xc1"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of one job: CPU seconds and bytes of new memory, and the addition to both per argument byte."""

    cpu_s: float
    memory_bytes: int
    cpu_s_per_byte: float = 0.0
    memory_bytes_per_byte: int = 0

    def cpu_s_of(self, n_bytes: int) -> float:
        """Return the limit in CPU seconds of a job with `n_bytes` of arguments."""
        return self.cpu_s + n_bytes * self.cpu_s_per_byte

    def memory_bytes_of(self, n_bytes: int) -> int:
        """Return the limit in bytes of memory of a job with `n_bytes` of arguments."""
        return self.memory_bytes + n_bytes * self.memory_bytes_per_byte


def encode(value: Any) -> bytes:
    """Encode plain values and bytes. Tuples become lists.

    A value with an integer of more than 64 bits or a lone surrogate, which msgpack cannot represent, is
    encoded as JSON. Raises TypeError for a value that is not plain.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return _JSON + json.dumps(value).encode("ascii")


def decode(raw: bytes) -> Any:
    """Decode the result of `encode`."""
    if raw.startswith(_JSON):
        return json.loads(raw[len(_JSON) :])
    return msgspec.msgpack.decode(raw)


def main(fd: int, module: str, limits: tuple[float, int, float, int]) -> None:
    """Run the jobs of the table JOBS of `module`. Serve the socket `fd` until its other end is closed.

    A job is `[name, arguments]`. The reply is `["ok", result]`, `["memory"]`, `["failed", class]`, or for a
    LlaisysError `["error", class, message, param]`.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # the parent handles these
        signal.signal(signal_number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the panic message of a library may contain its input
    channel = Channel.inherited(fd)
    jobs: Jobs = importlib.import_module(module).JOBS
    try:
        channel.send(encode(["ok", None]))
        while True:
            for raw in channel.receive():
                channel.send(_run_job(jobs, raw, JobLimits(*limits)))
                if len(raw) > TRIM_ABOVE_BYTES:
                    trim()
    except EOFError:
        return


def trim() -> None:
    """Return free memory of the C library to the system, in a few milliseconds without the GIL.

    Has no effect if the library is not glibc.
    """
    try:
        release = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    release(0)


def _run_job(jobs: Jobs, raw: bytes, limits: JobLimits) -> bytes:
    try:
        _limit(limits.cpu_s_of(len(raw)), limits.memory_bytes_of(len(raw)))
        name, arguments = decode(raw)
        reply = encode(["ok", jobs[name](*arguments)])
        if len(reply) > FRAME_BYTES_MAX:
            raise MemoryError
        return reply
    except LlaisysError as e:
        return encode(["error", type(e).__name__, str(e), e.param])
    except MemoryError:
        return encode(["memory"])
    except Exception as e:  # noqa: BLE001 -- only the class is reported; the text may contain the prompt
        return encode(["failed", type(e).__name__])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, _soft(resource.RLIM_INFINITY))


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """Set the limits of the next job. The memory limit is on address space in addition to that in use now."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split(maxsplit=1)[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, _soft(used + memory_bytes))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _soft(soft: int) -> tuple[int, int]:
    """Return a soft limit within the hard limit of the process, and the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    return soft, hard
