"""The entry point of an engine process: runs an EngineLoop for the ProcessClient that started it.

The parent handles Ctrl-C and SIGTERM. When the parent dies, this process ends at once. PR_SET_PDEATHSIG
reports the end of the parent's supervisor thread, and end-of-file on the socket reports the end of its
process.
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
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.grammar import GrammarCompiler
from llaisys.engine.loop import EngineListener, EngineLoop, build_engine
from llaisys.engine.memory import EngineSizing
from llaisys.engine.messages import (
    EngineEnded,
    FromEngine,
    Shutdown,
    Start,
    Started,
    StartFailed,
    StepOutputs,
    ToEngine,
    decode_to_engine,
    encode,
)
from llaisys.engine.watchdog import EngineWatchdog
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError
from llaisys.ipc import Channel
from llaisys.logs import start_log
from llaisys.stats import EngineStats

EXIT_OK, EXIT_BROKEN = 0, 70
# Seconds to wait until the parent has read the last messages.
FLUSH_S = 10.0
VERSION_CHANGED = "LLAISYS on disk has changed from version {} to {}: restart this process"
_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def main(fd: int, parent: int) -> NoReturn:
    """Serve one engine on the socket with file descriptor `fd` for the process `parent`, then exit."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    faulthandler.enable()
    exit_code = EXIT_BROKEN
    try:
        channel = Channel.inherited(fd)
        _exit_with_parent(parent, channel)
        _serve(channel)
        channel.flush(FLUSH_S)
        exit_code = EXIT_OK
    except BaseException:  # after any error, the parent must see this process end
        log.exception("the engine process failed")
    finally:
        logging.shutdown()
        os._exit(exit_code)  # a thread that never ends must not block the exit


def _serve(channel: Channel) -> None:
    """Serve until Shutdown. Sending never waits; the tokens of open requests bound the queued messages."""
    messages = _messages(channel)
    start = next(messages)
    if not isinstance(start, Start):
        raise TypeError(f"the first message is {type(start).__name__}, expected Start")
    start_log(start.log_level)

    def send(message: FromEngine) -> None:
        channel.send(encode(message))

    version = package_version()
    if start.version != version:
        send(StartFailed(RejectedError(VERSION_CHANGED.format(start.version, version))))
        return

    def on_step(outputs: list[EngineOutput], stats: EngineStats | None) -> None:
        send(StepOutputs(outputs, stats))

    def on_end(error: EngineDeadError) -> None:
        if watchdog.is_stuck:  # the parent sees the exit
            logging.shutdown()
            os._exit(EXIT_BROKEN)
        send(EngineEnded(error))

    watchdog = EngineWatchdog(start.watchdog_window_s, exits=True)

    compiler = None if start.grammar_tokenizer is None else GrammarCompiler(start.grammar_tokenizer)
    sizing = EngineSizing(
        start.settings, start.limits, "", start.speculation, start.draft_settings, start.kv_events
    )
    loop = EngineLoop(
        partial(build_engine, sizing, start.seed, compiler),
        EngineListener(on_step, send, send, on_end, time.monotonic),
        start.inbox_max,
        watchdog,
    )
    try:
        limits = loop.start()
    except LlaisysError as error:
        send(StartFailed(error))
        return
    send(Started(limits))
    for message in messages:
        match message:
            case Shutdown():
                loop.stop()
                return
            case Start():
                raise TypeError("the parent sent Start twice")
            case _:
                loop.send(message)


def _messages(channel: Channel) -> Iterator[ToEngine]:
    """Yield the parent's messages.

    Raises EOFError if the parent has died, and msgspec.DecodeError or LlaisysError for an invalid message.
    """
    while True:
        for raw in channel.receive():
            yield decode_to_engine(raw)


def _exit_with_parent(parent: int, channel: Channel) -> None:
    """End this process when its parent dies, whatever this process is doing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(EXIT_BROKEN)
    hung_up = select.poll()
    hung_up.register(channel.fileno(), select.POLLRDHUP)

    def wait_for_hangup() -> None:
        hung_up.poll()  # returns when the connection ends, without reading
        os._exit(EXIT_BROKEN)

    threading.Thread(target=wait_for_hangup, name="llaisys-parent-watch", daemon=True).start()
