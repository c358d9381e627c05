"""The engine in a process of its own: started, listened to, and restarted by a thread of this one.

Two sockets in a folder of ours alone (mode 0700), which is removed once both are connected; a pipe that only
the child holds open, whose end is its death. The thread that starts the child lives as long as the child may,
because Linux ties PR_SET_PDEATHSIG to the thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import zmq

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
    parent_sockets,
)
from llaisys.errors import EngineDeadError, LlaisysError

RESTARTS_MAX, RESTARTS_WINDOW_S = 3, 600.0
# A child that was told to end, or said that it ends, and is still there after so many seconds is killed.
END_S = 10.0
_BOOT = "import sys; sys.path[:] = {}; from llaisys.engine.child import main; main({!r}, {})"

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

        Raises what the loading raises, or EngineDeadError if the process died of it.
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
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        # Not in `close`: a submit on another thread may still hold the number.
        weakref.finalize(self, os.close, self._wake).atexit = False
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
        self._closing.set()
        os.eventfd_write(self._wake, 1)
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
            self._ended(end)
            if not self._loaded.done():  # the starter is told, and nobody else waits
                self._loaded.set_exception(end)
                return
            if not self._closing.is_set():
                log.error("%s%s", end, "; restarting it" if again else "")

    def _run_child(self) -> tuple[EngineDeadError, bool]:
        """From the start of a child to its death: what it died of, and whether to start another one."""
        child = _Child(self._start, self._wake)
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
            for raw in child.events():
                if raw is None:
                    return EngineDeadError(f"the engine process has {child.exit_text()}"), True
                try:
                    message = decode_from_engine(raw)
                except msgspec.DecodeError as what:
                    return EngineDeadError(f"the engine process sent no message: {what}"), True
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
        child.hide()
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
    """One engine process. `send` is for any thread, the rest for the supervisor's.

    Invariant: the sockets and the process belong to each other; a message to a dead child goes nowhere.
    """

    def __init__(self, start: Start, wake: int) -> None:
        self._wake = wake
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._folder = tempfile.mkdtemp(prefix="llaisys-")
        self._context = zmq.Context[zmq.Socket[bytes]]()
        try:
            self._inbox, self._outbox = parent_sockets(self._context, self._folder)
            self._process, self._sentinel = _spawn(self._folder)
        except BaseException:
            self._context.destroy(linger=0)
            self.hide()
            raise
        self._inbox.send(encode(start))
        self._poller = zmq.Poller()
        for source in (self._outbox, self._wake, self._sentinel):
            self._poller.register(source, zmq.POLLIN)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Submit | Cancel | Ask | Recall) -> None:
        """Leaves a message for it. Raises TypeError for what has no form on the wire."""
        self._outgoing.put(encode(message))
        os.eventfd_write(self._wake, 1)

    def events(self, timeout_s: float | None = None) -> Iterator[bytes | None]:
        """Waits; carries out what is to be sent; yields what came, and None at its death."""
        ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000) + 1))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while not self._outgoing.empty():
            self._inbox.send(self._outgoing.get())
        if self._outbox in ready:
            while (raw := self._receive()) is not None:
                yield raw
        elif self._sentinel in ready:
            yield None

    def hide(self) -> None:
        """Removes the sockets' folder, which nobody needs who is connected."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def finish(self) -> None:
        """Tells it to end, and waits for that at most END_S; what it still says is not heard."""
        self._inbox.send(encode(Shutdown()))
        until_s = time.monotonic() + END_S
        while (left_s := until_s - time.monotonic()) > 0:
            if None in list(self.events(left_s)):
                return
        log.warning("the engine process %d did not end within %.0f s and is killed", self.pid, END_S)

    def exit_text(self) -> str:
        """How it ended; waits for that, which is now."""
        code = self._process.wait()
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def close(self) -> None:
        """Kills it if it still lives, and frees everything."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._context.destroy(linger=0)
        os.close(self._sentinel)
        self.hide()

    def _receive(self) -> bytes | None:
        try:
            return self._outbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None


def _spawn(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the pipe that it alone holds the other end of."""
    sentinel, held = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(sys.path, folder, os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=(held,),
            start_new_session=True,  # Ctrl-C is the parent's
        )
    except BaseException:
        os.close(sentinel)
        raise
    finally:
        os.close(held)
    return process, sentinel
