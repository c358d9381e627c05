"""ProcessClient: an engine in a child process, which a supervisor thread starts, serves and restarts.

A socket pair connects the two processes; end-of-file means that the other process has died. The supervisor
also reads a pipe with the child's stderr, so that it can report the last lines of a child that died. It
outlives the child, because Linux ties PR_SET_PDEATHSIG to the thread that started the child.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from llaisys.config import EngineConfig, package_version
from llaisys.engine.client import Deliver, EngineClient
from llaisys.engine.grammar import GrammarTokenizer
from llaisys.engine.limits import Limits
from llaisys.engine.memory import EngineSizing
from llaisys.engine.messages import (
    Call,
    Cancel,
    EngineEnded,
    LoraReply,
    PrefixCacheReset,
    Shutdown,
    Start,
    Started,
    StartFailed,
    StepOutputs,
    Submit,
    TimelineReply,
    decode_from_engine,
    encode,
)
from llaisys.engine.sessions.manager import SessionReply
from llaisys.engine.watchdog import EngineWatchdog
from llaisys.errors import EngineDeadError, LlaisysError
from llaisys.ipc import Channel, FrameError
from llaisys.logs import STDERR, LineWriter

# Restarts of the child within a window of so many seconds, after which the client is lost.
RESTARTS_MAX, RESTARTS_WINDOW_S = 3, 600.0
# Seconds after which a child that should end, or has announced its end, is killed.
END_S = 10.0
# A failed start reports the last LOG_LINES lines of the child's stderr, from its last LOG_TAIL_BYTES bytes.
# Up to LOG_QUEUED_BYTES_MAX bytes wait while the reader of our stderr stalls. Further output is dropped,
# because it must not block the engine.
LOG_LINES, LOG_TAIL_BYTES, LOG_QUEUED_BYTES_MAX = 20, 16 << 10, 256 << 10
# The parent handles Ctrl-C, so the child gets its own process group. A session (setsid) would do, too, but
# has a scheduling group of its own (autogroup), and Linux 6.18 let one wait for a CPU for minutes.
_BOOT = (
    "import os, sys; os.setpgid(0, 0); sys.path[:] = {}; "
    "from llaisys.engine.process_main import main; main({}, {})"
)

log = logging.getLogger(__name__)


class RestartLimit:
    """Allows RESTARTS_MAX restarts within RESTARTS_WINDOW_S seconds, so that they end if every child dies."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def allow_restart(self) -> bool:
        """Return True and count a restart if one more is allowed now."""
        now_s = self._clock()
        while self._times and now_s - self._times[0] >= RESTARTS_WINDOW_S:
            self._times.popleft()
        if len(self._times) >= RESTARTS_MAX:
            return False
        self._times.append(now_s)
        return True


class ProcessClient(EngineClient):
    """An engine process and its supervisor thread, on which `deliver` is called.

    While the child is down, `error` has the reason and `submit` raises it. Open requests have ended and are
    not run again. The child is restarted at once, as often as RestartLimit allows.
    """

    def __init__(
        self,
        sizing: EngineSizing,
        config: EngineConfig,
        deliver: Deliver,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammar_tokenizer: GrammarTokenizer | None = None,
        watchdog: EngineWatchdog | None = None,
    ) -> None:
        """Start the process and wait until the model is loaded.

        `watchdog` watches the event loop of this process. Raises the error of loading the model. If the
        process died while loading, raises EngineDeadError with the exit code and the last lines of its log.
        """
        super().__init__(sizing.limits, deliver, watchdog)
        self._start = Start(
            version=package_version(),
            settings=sizing.settings,
            limits=sizing.limits,
            seed=config.seed,
            watchdog_window_s=config.watchdog_window_s,
            inbox_max=self._inbox_max,
            log_level=logging.getLogger().getEffectiveLevel(),
            grammar_tokenizer=grammar_tokenizer,
            speculation=sizing.speculation,
            draft_settings=sizing.draft_settings,
            kv_events=sizing.kv_events,
        )
        self._restarts = RestartLimit(clock)
        self._closing = threading.Event()
        self._loaded: Future[None] = Future()
        self._child: _EngineProcess | None = None
        self._log = _StderrRelay()
        self._thread = threading.Thread(target=self._supervise, name="llaisys-engine-client", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)
        try:
            self._loaded.result()
            if watchdog is not None:
                watchdog.start_for_event_loop(self._end_all)
        except BaseException:
            self.close()
            raise

    def _stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        self._closing.set()  # before reading `_child`, so that a child that is being started sees it
        if (child := self._child) is not None:
            child.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the supervisor's thread ---

    def _supervise(self) -> None:
        """Run one child after the other. End every open request, even after an unexpected error."""
        again = True
        while again:
            try:
                end, again = self._run_child()
            except BaseException as error:  # the open requests must end after any error
                log.exception("the engine process cannot be run")
                end, again = EngineDeadError(f"the engine process cannot be run: {error}"), False
            if self._closing.is_set():
                end, again = EngineDeadError("shutting down"), False
            elif again and not self._restarts.allow_restart():
                text = f"{end}; it was restarted {RESTARTS_MAX} times, which is the limit"
                end, again = EngineDeadError(text), False
            self._end_all(end, final=not again)
            if not self._loaded.done():  # only `__init__` waits
                lines = self._log.last_lines()
                text = f"{end}; the last lines of its log:\n{lines}" if lines else str(end)
                self._loaded.set_exception(EngineDeadError(text))
                break
            if not self._closing.is_set():
                log.error("%s%s", end, "; restarting it" if again else "")
        self._log.close()

    def _run_child(self) -> tuple[EngineDeadError, bool]:
        """Run a child until it dies. Return the cause of death, and whether to start another child."""
        self._child = child = _EngineProcess(self._start, self._log)
        try:
            return self._serve(child)
        finally:
            child.close()

    def _serve(self, child: _EngineProcess) -> tuple[EngineDeadError, bool]:
        while True:
            if self._closing.is_set():
                end = EngineDeadError("shutting down")
                if self._connection is not None:  # otherwise it is loading and reads no messages
                    self._end_all(end)
                    child.shut_down()
                return end, False
            try:
                messages = [decode_from_engine(raw) for raw in child.receive()]
            except EOFError:
                return EngineDeadError(f"the engine process {child.exit_text()}"), True
            except (FrameError, msgspec.DecodeError, UnicodeDecodeError) as what:
                return EngineDeadError(f"the engine process sent an invalid message: {what}"), True
            for message in messages:
                match message:
                    case Started(limits):
                        self._connect(child, limits)
                    case StartFailed(error):
                        return self._fail_start(error), False
                    case StepOutputs(outputs, stats):
                        self._receive_step(outputs, stats)
                    case SessionReply():
                        self._receive_session_reply(message)
                    case TimelineReply() | PrefixCacheReset() | LoraReply():
                        self._receive_reply(message)
                    case EngineEnded(error):
                        self._end_all(error)
                        child.shut_down()
                        return error, True

    def _connect(self, child: _EngineProcess, limits: Limits) -> None:
        self._set_limits(limits)
        self._connection = child
        self._error = None
        log.info("the engine process is %d", child.pid)
        if not self._loaded.done():
            self._loaded.set_result(None)

    def _fail_start(self, error: LlaisysError) -> EngineDeadError:
        """Pass the error of a failed load to `__init__`; a failed restart ends the client instead."""
        if not self._loaded.done():
            self._loaded.set_exception(error)
        return EngineDeadError(f"the model could not be loaded after a restart: {error}")


class _EngineProcess:
    """One engine process. `send` and `wake` may be called from any thread, the rest only by the supervisor.

    Invariant: only this process has the socket. A message to a dead process is lost. The channel queues
    messages that the process has not read yet. They belong to open requests and calls, so the engine's inbox
    size bounds them.
    """

    def __init__(self, start: Start, stderr: _StderrRelay) -> None:
        self._stderr = stderr
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            with theirs:
                self._process, self._log_pipe = _spawn(theirs)
        except BaseException:
            self._channel.close()
            raise
        stderr.reset()
        self._channel.watch(self._log_pipe, self._read_log)
        self._channel.send(encode(start))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Submit | Cancel | Call) -> None:
        """Send a message. Raises TypeError or RejectedError for a value that cannot be encoded."""
        self._channel.send(encode(message))

    def wake(self) -> None:
        """Make `receive` return early."""
        self._channel.wake()

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Send queued messages; wait for messages and return them.

        Raises EOFError if the process has died.
        """
        return self._channel.receive(timeout_s)

    def shut_down(self) -> None:
        """Send Shutdown and wait up to END_S seconds for the process to end. Its messages are dropped."""
        self._channel.send(encode(Shutdown()))
        until_s = time.monotonic() + END_S
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                self._channel.receive(left_s)
        except (EOFError, FrameError):
            return
        log.warning("the engine process %d did not end within %.0f s and is killed", self.pid, END_S)

    def exit_text(self) -> str:
        """Return how the process ended, for messages. It may have closed its socket and still be running."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"closed its socket and did not end within {END_S:.0f} s"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """Kill the process if it is still running, relay the rest of its log, and release all resources."""
        self._process.kill()
        self._process.wait()
        while self._log_pipe >= 0 and self._read_log():
            pass
        self._channel.close()
        if self._log_pipe >= 0:  # a child of the process holds the other end
            os.close(self._log_pipe)

    def _read_log(self) -> bool:
        """Relay the available stderr output; return False if there is none."""
        try:
            text = os.read(self._log_pipe, LOG_TAIL_BYTES)
        except BlockingIOError:
            return False
        if not text:
            self._channel.unwatch(self._log_pipe)
            os.close(self._log_pipe)
            self._log_pipe = -1
        self._stderr.write(text)
        return text != b""


class _StderrRelay:
    """Relays the children's stderr to ours, whose reader may stall. Keeps the newest child's last lines."""

    def __init__(self) -> None:
        self._tail = b""
        self._writer = LineWriter(STDERR, LOG_QUEUED_BYTES_MAX)

    def reset(self) -> None:
        """Drop the last lines, because a new child starts."""
        self._tail = b""

    def write(self, text: bytes) -> None:
        """Relay output. Never waits."""
        self._tail = (self._tail + text)[-LOG_TAIL_BYTES:]
        self._writer.write_raw(text)

    def last_lines(self) -> str:
        """Return the last lines of the newest child, up to LOG_LINES."""
        lines = self._tail.decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def close(self) -> None:
        """Wait until everything is relayed, or our reader has stalled for a second."""
        self._writer.close()


def _spawn(theirs: socket.socket) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process with its end of the socket pair; return it and its non-blocking stderr pipe."""
    log_pipe, stderr = os.pipe()
    try:
        os.set_blocking(log_pipe, False)
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(sys.path, theirs.fileno(), os.getpid())],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(theirs.fileno(),),
        )
    except BaseException:
        os.close(log_pipe)
        raise
    finally:
        os.close(stderr)
    return process, log_pipe
