"""The engine in a process of its own: started, listened to, and restarted by a thread of this one.

A socket pair connects the two; its end-of-file is the death of the other side. The child's stderr is a pipe
that the same thread reads, so that a report of its death has its last lines. That thread lives as long as
the child may, because Linux ties PR_SET_PDEATHSIG to the thread.
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

from llaisys.config import Config, package_version
from llaisys.engine.capacity import Capacity
from llaisys.engine.client import Deliver, EngineClient
from llaisys.engine.grammar import GrammarTokens
from llaisys.engine.limits import Limits
from llaisys.engine.watch import Watch
from llaisys.engine.wire import (
    Answer,
    Ask,
    Cancel,
    Ended,
    Recall,
    Recalled,
    Refused,
    Shutdown,
    Start,
    Started,
    Step,
    Submit,
    decode_from_engine,
    encode,
)
from llaisys.errors import EngineDeadError, LlaisysError
from llaisys.ipc import Channel, FrameError
from llaisys.logs import STDERR, LineWriter

RESTARTS_MAX, RESTARTS_WINDOW_S = 3, 600.0
# A child that was told to end, or said that it ends, and is still there after so many seconds is killed.
END_S = 10.0
# Of the child's stderr: the last lines that a failed start reports, within the last bytes of it, and the
# bytes that wait for a reader of our stderr that has stalled. What comes then is dropped: it must not stop
# the engine.
LOG_LINES, LOG_TAIL_BYTES, LOG_QUEUED_BYTES_MAX = 20, 16 << 10, 256 << 10
_BOOT = "import sys; sys.path[:] = {}; from llaisys.engine.child import main; main({}, {})"

log = logging.getLogger(__name__)


class Restarts:
    """At most RESTARTS_MAX within RESTARTS_WINDOW_S: a child that dies again and again is given up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: deque[float] = deque()

    def take(self) -> bool:
        """True, and counted, if one more is allowed now."""
        now_s = self._clock()
        while self._times and now_s - self._times[0] >= RESTARTS_WINDOW_S:
            self._times.popleft()
        if len(self._times) >= RESTARTS_MAX:
            return False
        self._times.append(now_s)
        return True


class ProcessClient(EngineClient):
    """An engine process and its supervisor, a thread of this one; `deliver` is called on that.

    While the child is down, `error` says so, every submit is refused with it, and what was open has been
    ended; nothing is run again. It is restarted at once, as often as Restarts allows.
    """

    def __init__(
        self,
        capacity: Capacity,
        config: Config,
        deliver: Deliver,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammar_tokens: GrammarTokens | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Starts the process and waits until the model is loaded. `watch`: of this process's event loop.

        Raises what the loading raises, or EngineDeadError, with the exit code and the last lines of its log,
        if the process died of it.
        """
        super().__init__(capacity.limits, deliver, watch)
        self._start = Start(
            version=package_version(),
            settings=capacity.settings,
            limits=capacity.limits,
            seed=config.seed,
            watchdog_window_s=config.watchdog_window_s,
            inbox_max=self._inbox_max,
            log_level=logging.getLogger().getEffectiveLevel(),
            grammar_tokens=grammar_tokens,
        )
        self._restarts = Restarts(clock)
        self._closing = threading.Event()
        self._loaded: Future[None] = Future()
        self._child: _Child | None = None
        self._log = _Stderr()
        self._thread = threading.Thread(target=self._supervise, name="llaisys-engine-client", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)
        try:
            self._loaded.result()
            if watch is not None:
                watch.begin_loop(self._ended)
        except BaseException:
            self.close()
            raise

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.end()
        self._closing.set()  # before the look at the child: one that is started now sees it
        if (child := self._child) is not None:
            child.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the supervisor's thread ---

    def _supervise(self) -> None:
        """One child after the other. Whatever goes wrong, every open request gets its end."""
        again = True
        while again:
            try:
                end, again = self._run_child()
            except BaseException as error:  # nothing may leave the requests without their end
                log.exception("the engine process cannot be run")
                end, again = EngineDeadError(f"the engine process cannot be run: {error}"), False
            if self._closing.is_set():
                end, again = EngineDeadError("shutting down"), False
            elif again and not self._restarts.take():
                end, again = EngineDeadError(f"{end}; it was restarted {RESTARTS_MAX} times, no more"), False
            self._ended(end, final=not again)
            if not self._loaded.done():  # the starter is told, and nobody else waits
                lines = self._log.last_lines()
                text = f"{end}; the last lines of its log:\n{lines}" if lines else str(end)
                self._loaded.set_exception(EngineDeadError(text))
                break
            if not self._closing.is_set():
                log.error("%s%s", end, "; restarting it" if again else "")
        self._log.close()

    def _run_child(self) -> tuple[EngineDeadError, bool]:
        """From the start of a child to its death: what it died of, and whether to start another one."""
        self._child = child = _Child(self._start, self._log)
        try:
            return self._attend(child)
        finally:
            child.close()

    def _attend(self, child: _Child) -> tuple[EngineDeadError, bool]:
        while True:
            if self._closing.is_set():
                end = EngineDeadError("shutting down")
                if self._link is not None:  # else it is loading, and hears nothing
                    self._ended(end)
                    child.finish()
                return end, False
            try:
                messages = [decode_from_engine(raw) for raw in child.receive()]
            except EOFError:
                return EngineDeadError(f"the engine process {child.exit_text()}"), True
            except (FrameError, msgspec.DecodeError, UnicodeDecodeError) as what:
                return EngineDeadError(f"the engine process sent no message: {what}"), True
            for message in messages:
                match message:
                    case Started(limits):
                        self._started(child, limits)
                    case Refused(error):
                        return self._refused(error), False
                    case Step(outputs, stats):
                        self._step(outputs, stats)
                    case Answer(answer):
                        self._answered(answer)
                    case Recalled() as recalled:
                        self._recalled(recalled)
                    case Ended(error):
                        self._ended(error)
                        child.finish()
                        return error, True

    def _started(self, child: _Child, limits: Limits) -> None:
        self._bound(limits)
        self._link = child
        self._error = None
        log.info("the engine process is %d", child.pid)
        if not self._loaded.done():
            self._loaded.set_result(None)

    def _refused(self, error: LlaisysError) -> EngineDeadError:
        """The model cannot be loaded: the starter's error, or, of a restart, the end."""
        if not self._loaded.done():
            self._loaded.set_exception(error)
        return EngineDeadError(f"the model cannot be loaded again: {error}")


class _Child:
    """One engine process. `send` and `wake` are for any thread, the rest for the supervisor's.

    Invariant: the socket and the process belong to each other; a message to a dead child goes nowhere.
    Messages that the child does not take yet wait in the channel: those of the open requests and calls, at
    most as many as the engine's inbox holds.
    """

    def __init__(self, start: Start, stderr: _Stderr) -> None:
        self._stderr = stderr
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            with theirs:
                self._process, self._log_pipe = _spawn(theirs)
        except BaseException:
            self._channel.close()
            raise
        stderr.begin()
        self._channel.watch(self._log_pipe, self._read_log)
        self._channel.send(encode(start))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Submit | Cancel | Ask | Recall) -> None:
        """Leaves a message for it. Raises TypeError or RejectedError for what has no form on the wire."""
        self._channel.send(encode(message))

    def wake(self) -> None:
        """Ends the supervisor's wait."""
        self._channel.wake()

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Waits, carries out what is to be sent, and returns what came. Raises EOFError at its death."""
        return self._channel.receive(timeout_s)

    def finish(self) -> None:
        """Tells it to end, and waits for that at most END_S; what it still says is not heard."""
        self._channel.send(encode(Shutdown()))
        until_s = time.monotonic() + END_S
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                self._channel.receive(left_s)
        except (EOFError, FrameError):
            return
        log.warning("the engine process %d did not end within %.0f s and is killed", self.pid, END_S)

    def exit_text(self) -> str:
        """How it ended. It is over now, but for a process that has closed its socket and goes on."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"closed its socket and did not end within {END_S:.0f} s"
        return f"has died of {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def close(self) -> None:
        """Kills it if it still lives, passes on the rest of its log, and frees everything."""
        self._process.kill()
        self._process.wait()
        while self._log_pipe >= 0 and self._read_log():
            pass
        self._channel.close()
        if self._log_pipe >= 0:  # a process of its own holds the other end
            os.close(self._log_pipe)

    def _read_log(self) -> bool:
        """Passes on what is there of its stderr; False if nothing is."""
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


class _Stderr:
    """Passes the children's stderr on to ours, whose reader may stall, and keeps the last lines of the
    newest."""

    def __init__(self) -> None:
        self._tail = b""
        self._writer = LineWriter(STDERR, LOG_QUEUED_BYTES_MAX)

    def begin(self) -> None:
        """A new child: the last lines are its own."""
        self._tail = b""

    def write(self, text: bytes) -> None:
        """Never waits."""
        self._tail = (self._tail + text)[-LOG_TAIL_BYTES:]
        self._writer.write_raw(text)

    def last_lines(self) -> str:
        """The newest lines of the newest child, LOG_LINES at most."""
        lines = self._tail.decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def close(self) -> None:
        """Returns when all is passed on, or our reader has stalled for a second."""
        self._writer.close()


def _spawn(theirs: socket.socket) -> tuple[subprocess.Popen[bytes], int]:
    """The process, with its end of the socket pair, and the pipe of its stderr, which never waits."""
    log_pipe, stderr = os.pipe()
    try:
        os.set_blocking(log_pipe, False)
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(sys.path, theirs.fileno(), os.getpid())],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is the parent's
        )
    except BaseException:
        os.close(log_pipe)
        raise
    finally:
        os.close(stderr)
    return process, log_pipe
