"""The engine process: reads messages, runs an EngineLoop, sends what it gives. Started by ProcessClient only.

It lives for its parent: Ctrl-C and SIGTERM are the parent's to answer, and when the parent is gone (its
thread by PR_SET_PDEATHSIG, its process by the end of stdin) this process ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import threading
import time
from functools import partial
from typing import NoReturn

import zmq

from llaisys.config import package_version
from llaisys.engine.grammar import Grammars
from llaisys.engine.loop import EngineLoop, Listener, build_engine
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.sessions import SessionAnswer
from llaisys.engine.watch import Watch
from llaisys.engine.wire import (
    Answer,
    Ask,
    Cancel,
    Ended,
    FromEngine,
    Recall,
    Refused,
    Shutdown,
    Start,
    Started,
    Step,
    Submit,
    ToEngine,
    child_sockets,
    decode_to_engine,
    encode,
)
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError
from llaisys.logs import start_log
from llaisys.stats import EngineStats

EXIT_OK, EXIT_BROKEN = 0, 70
VERSION_CHANGED = "LLAISYS was changed on the disk (it ran {}, now it is {}): restart this process"
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def main(folder: str, parent: int) -> NoReturn:
    """Serves one engine on the sockets in `folder` for the process `parent`, and exits."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    _die_with(parent)
    exit_code = EXIT_BROKEN
    try:
        wire = _Wire(folder)
        _serve(wire)
        wire.close()
        exit_code = EXIT_OK
    except BaseException:  # whatever it is, the parent must see this process end
        log.exception("the engine process cannot go on")
    finally:
        logging.shutdown()
        os._exit(exit_code)  # what cannot be sent, or a thread that does not end, must not hold it up


class _Wire:
    """Both sockets. `receive` is for the main thread, `send` for the engine's (before it: the main one)."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._inbox, self._outbox = child_sockets(self._context, folder)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._context.destroy()

    def receive(self) -> ToEngine:
        """Raises msgspec.DecodeError or LlaisysError for what is no message."""
        return decode_to_engine(self._inbox.recv())

    def send(self, message: FromEngine) -> None:
        """Never waits."""
        self._outbox.send(encode(message))


def _serve(wire: _Wire) -> None:
    start = wire.receive()
    if not isinstance(start, Start):
        raise TypeError(f"{type(start).__name__} came before Start")
    start_log(start.log_level)
    version = package_version()
    if start.version != version:
        wire.send(Refused(RejectedError(VERSION_CHANGED.format(start.version, version))))
        return

    def step(outputs: list[EngineOutput], stats: EngineStats) -> None:
        wire.send(Step(outputs, stats))

    def answer(answer: SessionAnswer) -> None:
        wire.send(Answer(answer))

    def ended(error: EngineDeadError) -> None:
        if watch.stuck:  # the socket is the engine thread's, which is in there; the parent sees the exit
            logging.shutdown()
            os._exit(EXIT_BROKEN)
        wire.send(Ended(error))

    watch = Watch(start.watchdog_window_s, exits=True)

    grammars = None if start.grammar_tokens is None else Grammars(start.grammar_tokens)
    loop = EngineLoop(
        partial(build_engine, start.settings, start.limits, start.seed, grammars),
        Listener(step, answer, wire.send, ended, time.monotonic),
        start.inbox_max,
        watch,
    )
    try:
        limits = loop.start()
    except LlaisysError as error:
        wire.send(Refused(error))
        return
    wire.send(Started(limits))
    while True:
        match wire.receive():
            case Shutdown():
                loop.stop()
                return
            case Start():
                raise TypeError("a second Start")
            case message:
                _compile_first(grammars, message)
                loop.send(message)


def _compile_first(grammars: Grammars | None, message: Submit | Cancel | Ask | Recall) -> None:
    """A grammar is compiled here, so that the engine's steps do not wait for it. The door has compiled it
    before; should it fail here, the engine finds that too, and ends its request."""
    if isinstance(message, Submit) and grammars is not None:
        spec = message.request.params.structured_outputs
        if spec is not None:
            with contextlib.suppress(LlaisysError):
                grammars.compile(spec)


def _die_with(parent: int) -> None:
    """Ends this process, in whatever it is, with its parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(EXIT_BROKEN)

    def watch() -> None:
        os.read(0, 1)  # nothing is ever written: it returns at the end of the pipe
        os._exit(EXIT_BROKEN)

    threading.Thread(target=watch, name="llaisys-parent-watch", daemon=True).start()
