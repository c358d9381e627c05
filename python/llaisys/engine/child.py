"""The engine process: reads messages, runs an EngineLoop, sends what it gives. Started by ProcessClient only.

It lives for its parent: Ctrl-C and SIGTERM are the parent's to answer, and when the parent is gone (its
thread by PR_SET_PDEATHSIG, its process by the end of the socket) this process ends at once.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

from llaisys.config import package_version
from llaisys.engine.grammar import Grammars
from llaisys.engine.loop import EngineLoop, Listener, build_engine
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.sessions import SessionAnswer
from llaisys.engine.watch import Watch
from llaisys.engine.wire import (
    Answer,
    Ended,
    FromEngine,
    Refused,
    Shutdown,
    Start,
    Started,
    Step,
    ToEngine,
    decode_to_engine,
    encode,
)
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError
from llaisys.ipc import Channel
from llaisys.logs import start_log
from llaisys.stats import EngineStats

EXIT_OK, EXIT_BROKEN = 0, 70
# How long the last messages wait for a parent that does not read.
FLUSH_S = 10.0
VERSION_CHANGED = "LLAISYS was changed on the disk (it ran {}, now it is {}): restart this process"
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def main(number: int, parent: int) -> NoReturn:
    """Serves one engine on the socket of this number for the process `parent`, and exits."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    faulthandler.enable()
    exit_code = EXIT_BROKEN
    try:
        channel = Channel.inherited(number)
        _die_with(parent, channel)
        _serve(channel)
        channel.flush(FLUSH_S)
        exit_code = EXIT_OK
    except BaseException:  # whatever it is, the parent must see this process end
        log.exception("the engine process cannot go on")
    finally:
        logging.shutdown()
        os._exit(exit_code)  # a thread that does not end must not hold it up


def _serve(channel: Channel) -> None:
    """Outgoing messages never wait; what the parent does not take yet is bounded by the open requests'
    tokens."""
    messages = _messages(channel)
    start = next(messages)
    if not isinstance(start, Start):
        raise TypeError(f"{type(start).__name__} came before Start")
    start_log(start.log_level)

    def send(message: FromEngine) -> None:
        channel.send(encode(message))

    version = package_version()
    if start.version != version:
        send(Refused(RejectedError(VERSION_CHANGED.format(start.version, version))))
        return

    def step(outputs: list[EngineOutput], stats: EngineStats) -> None:
        send(Step(outputs, stats))

    def answer(answer: SessionAnswer) -> None:
        send(Answer(answer))

    def ended(error: EngineDeadError) -> None:
        if watch.stuck:  # the parent sees the exit
            logging.shutdown()
            os._exit(EXIT_BROKEN)
        send(Ended(error))

    watch = Watch(start.watchdog_window_s, exits=True)

    grammars = None if start.grammar_tokens is None else Grammars(start.grammar_tokens)
    loop = EngineLoop(
        partial(build_engine, start.settings, start.limits, start.seed, grammars),
        Listener(step, answer, send, ended, time.monotonic),
        start.inbox_max,
        watch,
    )
    try:
        limits = loop.start()
    except LlaisysError as error:
        send(Refused(error))
        return
    send(Started(limits))
    for message in messages:
        match message:
            case Shutdown():
                loop.stop()
                return
            case Start():
                raise TypeError("a second Start")
            case _:
                loop.send(message)


def _messages(channel: Channel) -> Iterator[ToEngine]:
    """What the parent sends. Raises EOFError when it has died, msgspec.DecodeError or LlaisysError for what
    is not a message."""
    while True:
        for raw in channel.receive():
            yield decode_to_engine(raw)


def _die_with(parent: int, channel: Channel) -> None:
    """Ends this process with its parent, whatever it is doing then."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(EXIT_BROKEN)
    hung_up = select.poll()
    hung_up.register(channel.fileno(), select.POLLRDHUP)

    def watch() -> None:
        hung_up.poll()  # reads nothing: it returns at the end of the connection
        os._exit(EXIT_BROKEN)

    threading.Thread(target=watch, name="llaisys-parent-watch", daemon=True).start()
