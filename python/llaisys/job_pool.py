"""JobPool: runs jobs in worker processes that may be killed, for work whose cost depends on a request.

A job that exceeds its limits ends only its worker process. Data path: event loop -> one thread per process ->
one job at a time over a socket pair -> its result.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from llaisys import errors
from llaisys.config import bare_environment
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError, RequestFailedError
from llaisys.ipc import FRAME_BYTES_MAX, Channel, FrameError
from llaisys.job_process import JobLimits, decode, encode

# Seconds of real time without a result after which a process counts as dead. A job that runs reaches its CPU
# time limit earlier, so the process was stopped.
STOPPED_AFTER_S = 120.0
_BOOT = "import sys; sys.path[:] = {}; from llaisys.job_process import main; main({}, {!r}, {})"

log = logging.getLogger(__name__)

Job: TypeAlias = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class JobText:
    """The error text of a job that exceeds its limits.

    - `what`: the subject of the sentence, before "takes more than 2 s of CPU time".
    - `param`: the field of the request; None if it is the whole body.
    """

    what: str
    param: str | None = None


class JobPool:
    """`n_processes` worker processes that run the jobs of one module (its table JOBS).

    Unless stated otherwise, call the methods on one event loop.
    """

    def __init__(
        self, module: str, n_processes: int, limits: JobLimits, texts: Mapping[str, JobText], *, name: str
    ) -> None:
        """Initialize the pool; the first job starts a process.

        - `texts`: the error texts by job name.
        - `name`: the name of the processes and their threads, also in the log.
        """
        self._preparations: list[Job] = []
        self._processes = [
            _WorkerProcess(module, limits, texts, name, self._preparations) for _ in range(n_processes)
        ]
        self._idle = queue.LifoQueue[_WorkerProcess]()  # the last used process has the warmest caches
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(n_processes, thread_name_prefix=f"llaisys-{name}")
        self._warming: list[asyncio.Future[None]] = []

    def add_preparation(self, name: str, *arguments: Any) -> None:
        """Add a job that every process runs before all later jobs, and again after each restart.

        A process starts with its first job, or in `prepare`.
        """
        self._preparations.append((name, arguments))

    def prepare(self, name: str, *arguments: Any) -> None:
        """Add a job as `add_preparation` does, and start the processes; `ready` waits for them."""
        self.add_preparation(name, *arguments)
        loop = asyncio.get_running_loop()
        self._warming += [
            loop.run_in_executor(self._threads, process.ensure, len(self._preparations))
            for process in self._processes
        ]

    async def ready(self) -> None:
        """Wait until every process is prepared. Raises the error of a preparation, or RequestFailedError."""
        await asyncio.gather(*self._warming)
        self._warming.clear()

    async def run(self, name: str, *arguments: Any) -> Any:
        """Run a job and return its result. Arguments and result are plain values or bytes.

        Raises the job's own LlaisysError, RejectedError if it exceeds its limits, RequestFailedError for any
        other failure, EngineDeadError after `close`.
        """
        loop = asyncio.get_running_loop()
        try:
            result = loop.run_in_executor(self._threads, self.call, name, *arguments)
        except RuntimeError:  # `close` has shut the threads down
            raise EngineDeadError("shutting down: no new requests") from None
        return await result

    async def close(self) -> None:
        """Stop the processes; running jobs fail. Idempotent."""
        for warming in self._warming:
            warming.cancel()
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """Stop the processes from any thread. Blocks until they have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a job as `run` does, from any thread. Blocks until it has ended."""
        process = self._idle.get()
        try:
            return process.call(name, arguments)
        finally:
            self._idle.put(process)


class _WorkerProcess:
    """One worker process and its restarts. `preparations` may grow; a lock serializes the calls."""

    def __init__(
        self,
        module: str,
        limits: JobLimits,
        texts: Mapping[str, JobText],
        name: str,
        preparations: Sequence[Job],
    ) -> None:
        self._module = module
        self._limits = limits
        self._texts = texts
        self._name = name
        self._preparations = preparations
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._num_prepared = 0
        self._closed = False

    def ensure(self, num_prepared: int) -> None:
        """Start the process unless it is running; run its first `num_prepared` preparations."""
        with self._lock:
            self._ensure(num_prepared)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Run a job and return its result; raises the errors of `JobPool.run`.

        If something else than a limit killed the process (the kernel, an operator), the job runs once more. A
        job that ends two processes fails.
        """
        raw = encode((name, arguments))
        if len(raw) > FRAME_BYTES_MAX:
            text = self._texts[name]
            raise RejectedError(f"{text.what} takes more than {FRAME_BYTES_MAX} bytes", param=text.param)
        with self._lock:
            try:
                reply = self._run_twice(raw)
            except _Died as died:
                if self._closed:
                    raise EngineDeadError("shutting down: no new requests") from None
                self._ensure(len(self._preparations))  # restart now, so that only this request waits
                raise self._error(name, len(raw), died.reason) from None
        return self._result(name, len(raw), reply)

    def close(self) -> None:
        """Stop the process; a call in progress fails."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
        with self._lock:
            self._drop()

    def _run_twice(self, raw: bytes) -> list[Any]:
        self._ensure(len(self._preparations))
        try:
            return self._exchange(raw)
        except _Died as died:
            if died.is_limit or self._closed:
                raise
            log.warning("a %s process %s; its job runs again", self._name, died)
        self._ensure(len(self._preparations))
        return self._exchange(raw)

    def _ensure(self, num_prepared: int) -> None:
        if self._closed:
            raise EngineDeadError("shutting down: no new requests")
        try:
            if self._child is None or self._child.poll() is not None:
                self._spawn()
            while self._num_prepared < num_prepared:
                job = self._preparations[self._num_prepared]
                self._result(job[0], 0, self._exchange(encode(job)))
                self._num_prepared += 1
        except _Died as died:
            log.error("a %s process cannot be started: it %s", self._name, died)
            raise RequestFailedError(f"a {self._name} process cannot be started") from None

    def _spawn(self) -> None:
        self._drop()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            boot = _BOOT.format(sys.path, theirs.fileno(), self._module, astuple(self._limits))
            self._child = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=bare_environment(),
            )
        self._num_prepared = 0
        self._receive()

    def _exchange(self, raw: bytes) -> list[Any]:
        assert self._channel is not None
        self._channel.send(raw)  # lost if the process has died, which `receive` reports
        return self._receive()

    def _receive(self) -> list[Any]:
        assert self._channel is not None
        assert self._child is not None
        try:
            frames = self._channel.receive(STOPPED_AFTER_S) or self._channel.receive(
                1.0
            )  # this process may have been stopped as well
            if not frames:
                raise EOFError
            reply: list[Any] = decode(frames[0])
        except (EOFError, FrameError):
            self._child.kill()  # the child may only have closed its end
            raise _Died(self._child.wait()) from None
        return reply

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._channel = self._child = None

    def _result(self, name: str, n_bytes: int, reply: list[Any]) -> Any:
        """Return the result of a reply, or raise its error."""
        match reply:
            case ["ok", result]:
                return result
            case ["error", str(kind), str(message), param]:
                known: type[LlaisysError] = getattr(errors, kind)
                raise known(message, param=param)
            case ["memory"]:
                raise self._error(name, n_bytes, "memory")
            case ["failed", str(kind)]:
                raise RequestFailedError(f"a {self._name} process failed with {kind}")
        raise RequestFailedError(f"a {self._name} process sent an invalid reply")

    def _error(self, name: str, n_bytes: int, reason: str) -> LlaisysError:
        text = self._texts[name]
        match reason:
            case "time":
                bound = f"{self._limits.cpu_s_of(n_bytes):.1f} s of CPU time"
            case "memory":
                bound = f"{self._limits.memory_bytes_of(n_bytes) >> 20} MiB of memory"
            case _:
                log.error("a %s process %s during a request", self._name, reason)
                return RequestFailedError(f"a {self._name} process {reason}")
        return RejectedError(f"{text.what} takes more than {bound}", param=text.param)


class _Died(Exception):
    """The process ended during a call. `reason`: time, memory, or the exit code as text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ended with code {code}")
        why = {-signal.SIGPROF: "time", -signal.SIGABRT: "memory", -signal.SIGSEGV: "memory"}.get(code)
        self.is_limit = why is not None  # ended by the job's limits
        self.reason = why or f"ended with code {code}"
