"""A job process: carries out jobs for a JobPool, one after the other, each within its limits.

It exists to be killed. The end of a job's CPU time is the end of the process (SIGPROF), which also ends C
code that never returns; memory ends in a MemoryError, or in the abort of a library. Jobs and the texts of
their errors may hold prompts, so it logs nothing.
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

# What a module of jobs has under the name JOBS: arguments -> the result, both of plain values.
Jobs: TypeAlias = Mapping[str, Callable[..., Any]]

_PAGE = resource.getpagesize()


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one job may use: CPU seconds and bytes of new memory, and more of both for each byte of its
    arguments."""

    cpu_s: float
    memory_bytes: int
    cpu_s_per_byte: float = 0.0
    memory_bytes_per_byte: int = 0

    def cpu_s_of(self, n_bytes: int) -> float:
        """CPU seconds of a job with arguments of this size."""
        return self.cpu_s + n_bytes * self.cpu_s_per_byte

    def memory_bytes_of(self, n_bytes: int) -> int:
        """Bytes of memory of a job with arguments of this size."""
        return self.memory_bytes + n_bytes * self.memory_bytes_per_byte


def encode(value: Any) -> bytes:
    """Plain values, of JSON and bytes, as bytes. Tuples become lists.

    msgpack has no integers beyond 64 bits and no lone surrogates, which JSON has: a value that holds one
    goes as JSON text. Raises TypeError for a value that is not plain.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return _JSON + json.dumps(value).encode("ascii")


def decode(raw: bytes) -> Any:
    """The value that `encode` had."""
    if raw.startswith(_JSON):
        return json.loads(raw[len(_JSON) :])
    return msgspec.msgpack.decode(raw)


# A job of more bytes may leave hundreds of MiB that the C library holds free.
TRIM_ABOVE_BYTES = 64 << 10
# A byte that begins no msgpack value.
_JSON = b"\xc1"


def main(number: int, module: str, limits: tuple[float, int, float, int]) -> None:
    """Serves the socket of this number until its other end is closed. `module` has the table JOBS.

    A job is `[name, arguments]`. Its answer is `["ok", result]`, or what went wrong: `["memory"]`,
    `["failed", class]`, or, for an error of ours, `["error", class, message, param]`.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # the parent's to answer
        signal.signal(signal_number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of a library may show its input
    channel = Channel.inherited(number)
    jobs: Jobs = importlib.import_module(module).JOBS
    try:
        channel.send(encode(["ok", None]))
        while True:
            for raw in channel.receive():
                channel.send(_answer(jobs, raw, JobLimits(*limits)))
                if len(raw) > TRIM_ABOVE_BYTES:
                    trim()
    except EOFError:
        return


def trim() -> None:
    """Gives back every whole page that the C library holds free: some milliseconds, without the GIL. Nothing
    where the library is not glibc."""
    try:
        release = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    release(0)


def _answer(jobs: Jobs, raw: bytes, limits: JobLimits) -> bytes:
    try:
        _limit(limits.cpu_s_of(len(raw)), limits.memory_bytes_of(len(raw)))
        name, arguments = decode(raw)
        answer = encode(["ok", jobs[name](*arguments)])
        if len(answer) > FRAME_BYTES_MAX:
            raise MemoryError
        return answer
    except LlaisysError as e:
        return encode(["error", type(e).__name__, str(e), e.param])
    except MemoryError:
        return encode(["memory"])
    except Exception as e:  # noqa: BLE001 -- reported by its class; its text may be the prompt's
        return encode(["failed", type(e).__name__])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, _soft(resource.RLIM_INFINITY))


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """Sets the limits of what comes next. Address space is counted from what is in use now."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split(maxsplit=1)[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, _soft(used + memory_bytes))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _soft(soft: int) -> tuple[int, int]:
    """A soft limit under the process's hard one, which cannot be raised again."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    return soft, hard
