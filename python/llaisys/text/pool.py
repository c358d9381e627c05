"""The text processes of a server: what a request's size or a template's will could make long is done there.

Data path: event loop -> a thread for each process -> one job at a time over a socket pair -> the answer. A
process that breaks its allowance dies with that job alone, and is started again before the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import marshal
import queue
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from llaisys import errors
from llaisys.body import Flaw
from llaisys.config import bare_environment
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError, RequestFailedError
from llaisys.text.child import CPU_S, CPU_S_PER_BYTE, MEMORY_BYTES, MEMORY_BYTES_PER_BYTE
from llaisys.text.template import ChatTemplate
from llaisys.text.tokenizer import Tokenizer

N_PROCESSES = 2
# By the clock, of a process that does not get on and does not use its CPU time either (it was stopped).
PATIENCE_S = 120.0
_BOOT = "import sys; sys.path[:] = {}; from llaisys.text.child import main; main({}, {})"
# What a job's refusal is about: its field and its words.
_ABOUT = {
    "chat": ("messages", "rendering and tokenising these messages"),
    "encode": ("prompt", "tokenising this text"),
    "json": (None, "reading this body"),
    "decode": (None, "detokenising these ids"),
    "kit": (None, "reading the tokenizer"),
}

log = logging.getLogger(__name__)

Kit = tuple[str, Mapping[str, str] | None, Mapping[str, str]]


class TextPool:
    """N_PROCESSES processes, for all models of a server. The methods belong to one event loop."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        """`cpu_s`: CPU time that each job may take; large ones get more for each byte."""
        self._kits: list[Kit] = []
        self._processes = [_TextProcess(self._kits, cpu_s) for _ in range(N_PROCESSES)]
        self._idle = queue.LifoQueue[_TextProcess]()  # the last one used is the warmest
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(N_PROCESSES, thread_name_prefix="llaisys-text")
        self._warming: list[asyncio.Future[None]] = []

    def add(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> PromptMaker:
        """Makes a model known; the processes (started by the first one) read its tokenizer right away."""
        source = None if template is None else template.source
        texts = None if source is None else dict(source.texts)
        self._kits.append((tokenizer.to_json(), texts, {} if source is None else dict(source.special_tokens)))
        loop = asyncio.get_running_loop()
        self._warming += [
            loop.run_in_executor(self._threads, process.ensure, len(self._kits))
            for process in self._processes
        ]
        return PromptMaker(self, len(self._kits) - 1)

    async def ready(self) -> None:
        """Returns when every process knows every model. Raises RequestFailedError if one cannot."""
        await asyncio.gather(*self._warming)
        self._warming.clear()

    async def read_body(self, raw: bytes, model: str | None) -> tuple[Any, Flaw | None]:
        """`llaisys.body.read_body` there; raises json.JSONDecodeError (its position alone), RejectedError."""
        value, flaw = await self.run("json", 0, raw, model)
        return value, flaw

    async def run(self, name: str, kit: int, *arguments: Any) -> Any:
        """The answer of a job. Raises RejectedError for one that is over its allowance."""
        loop = asyncio.get_running_loop()
        try:
            answer = loop.run_in_executor(self._threads, self._run, name, kit, arguments)
        except RuntimeError:  # `close` has shut the threads down
            raise EngineDeadError("shutting down: no new requests") from None
        return await answer

    async def close(self) -> None:
        """Ends the processes; what they work on fails. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for warming in self._warming:
            warming.cancel()
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in self._processes))

    def _run(self, name: str, kit: int, arguments: tuple[Any, ...]) -> Any:
        process = self._idle.get()
        try:
            return process.call(name, kit, arguments)
        finally:
            self._idle.put(process)


class PromptMaker:
    """Token ids of one model's prompts, made in the text processes."""

    def __init__(self, pool: TextPool, kit: int) -> None:
        self._pool = pool
        self._kit = kit

    async def encode(self, text: str, add_special_tokens: bool, n_most: int | None = None) -> list[int]:
        """As `Tokenizer.encode`."""
        return _unpacked(await self._pool.run("encode", self._kit, text, add_special_tokens, n_most))

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As `Tokenizer.decode`."""
        packed = array("I", ids).tobytes()
        text: str = await self._pool.run("decode", self._kit, packed, skip_special_tokens)
        return text

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_special_tokens: bool,
        n_most: int | None = None,
    ) -> list[int]:
        """A conversation as `ChatTemplate.render` renders it with these options, as `encode` encodes it."""
        arguments = (list(messages), dict(options), add_special_tokens, n_most)
        return _unpacked(await self._pool.run("chat", self._kit, *arguments))


class _TextProcess:
    """One process, its restarts, and which models it knows. `kits` grows; a lock makes calls one by one."""

    def __init__(self, kits: Sequence[Kit], cpu_s: float) -> None:
        self._kits = kits
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._n_known = 0
        self._closed = False

    def ensure(self, n_kits: int) -> None:
        """Returns with a process that knows so many models."""
        with self._lock:
            self._ensure(n_kits)

    def call(self, name: str, kit: int, arguments: tuple[Any, ...]) -> Any:
        """The answer; the error that it met there, or RejectedError for what was over its allowance.

        A process that somebody else ended (the kernel out of memory, an operator) costs no request: its job
        is done once more. A job that ends two of them fails.
        """
        raw = marshal.dumps((name, kit, arguments))
        with self._lock:
            try:
                answer = self._done(raw)
            except _Died as died:
                if not self._closed:
                    self._ensure(len(self._kits))  # here, so that only this request waits for it
                raise _refusal(name, len(raw), died.reason, self._cpu_s) from None
        return _value(name, len(raw), answer)

    def close(self) -> None:
        """Ends the process; a call that is under way fails."""
        self._closed = True
        if self._child is not None:
            self._child.kill()
        with self._lock:
            self._drop()

    def _done(self, raw: bytes) -> tuple[Any, ...]:
        self._ensure(len(self._kits))
        try:
            return self._exchange(raw)
        except _Died as died:
            if died.is_ours or self._closed:
                raise
            log.warning("a text process %s; its job is done once more", died)
        self._ensure(len(self._kits))
        return self._exchange(raw)

    def _ensure(self, n_kits: int) -> None:
        if self._closed:
            raise EngineDeadError("shutting down: no new requests")
        try:
            if self._child is None or self._child.poll() is not None:
                self._spawn()
            while self._n_known < n_kits:
                kit: Any = self._kits[self._n_known]
                _value("kit", 0, self._exchange(marshal.dumps(("kit", self._n_known, kit))))
                self._n_known += 1
        except _Died as died:
            log.error("a text process cannot be started: it %s", died)
            raise RequestFailedError("a text process cannot be started") from None

    def _spawn(self) -> None:
        self._drop()
        ours, theirs = socket.socketpair()
        with theirs:
            boot = _BOOT.format(sys.path, theirs.fileno(), self._cpu_s)
            command = [sys.executable, "-c", boot]
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=bare_environment()
            )
        self._line = Connection(ours.detach())
        self._n_known = 0
        self._receive()

    def _exchange(self, raw: bytes) -> tuple[Any, ...]:
        assert self._line is not None
        try:
            self._line.send_bytes(raw)
        except OSError:
            raise self._died() from None
        return self._receive()

    def _receive(self) -> tuple[Any, ...]:
        assert self._line is not None
        assert self._child is not None
        try:
            if not self._line.poll(PATIENCE_S) and not self._line.poll(1.0):  # both may have been stopped
                self._child.kill()
            answer: tuple[Any, ...] = marshal.loads(self._line.recv_bytes())
        except (EOFError, OSError):
            raise self._died() from None
        return answer

    def _died(self) -> _Died:
        assert self._child is not None
        self._child.kill()  # it may have closed its end only
        return _Died(self._child.wait())

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._line = self._child = None


class _Died(Exception):
    """The process has ended during a call. `reason`: time, memory, or what `subprocess` says."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ended with code {code}")
        why = {-signal.SIGPROF: "time", -signal.SIGABRT: "memory", -signal.SIGSEGV: "memory"}.get(code)
        self.is_ours = why is not None  # the end of the job's allowance
        self.reason = why or f"ended with code {code}"


def _value(name: str, n_bytes: int, answer: tuple[Any, ...]) -> Any:
    """What an answer says, or its error raised."""
    match answer:
        case ("ok", value):
            return value
        case ("json", int(position)):
            raise json.JSONDecodeError("", "", position)
        case ("error", str(kind), str(message), param):
            known: type[LlaisysError] = getattr(errors, kind)
            raise known(message, param=param)
        case ("memory",):
            raise _refusal(name, n_bytes, "memory")
        case ("failed", "UnicodeDecodeError" | "RecursionError") if name == "json":
            raise ValueError("no JSON text")
        case ("failed", str(kind)):
            raise RequestFailedError(f"a text process met {kind}")
    raise RequestFailedError("a text process answered with no answer")


def _refusal(name: str, n_bytes: int, reason: str, cpu_s: float = CPU_S) -> LlaisysError:
    param, what = _ABOUT[name]
    match reason:
        case "time":
            bound = f"{cpu_s + n_bytes * CPU_S_PER_BYTE:.1f} s of CPU time"
        case "memory":
            bound = f"{(MEMORY_BYTES + n_bytes * MEMORY_BYTES_PER_BYTE) >> 20} MiB of memory"
        case _:
            log.error("a text process %s during a request", reason)
            return RequestFailedError(f"a text process {reason}")
    return RejectedError(f"{what} takes more than {bound}", param=param)


def _unpacked(raw: bytes) -> list[int]:
    return array("I", raw).tolist()
