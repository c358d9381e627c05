"""Whole messages between two processes of this machine: frames over a pair of connected Unix sockets.

A frame is its length (4 bytes, little-endian) and that many bytes. Sending never waits: what the kernel does
not take is queued, and leaves while the same end receives or sends again. End-of-file means that the peer
has died.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

# The largest frame, either way. A tokenizer file or a body of the largest size that is of use is far below.
FRAME_BYTES_MAX = 512 << 20
# What may wait for a peer that does not read. A message belongs to an open request, so only a peer that has
# stopped lets this much pile up; it is then given up, as one that died.
QUEUED_BYTES_MAX = 1 << 30
_READ_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The peer sent what is not a frame."""


class Channel:
    """One end of the pair. `send` and `wake` are for any thread; the rest is for the one thread that
    receives.

    While the receiving thread waits, it sends for the others: the kernel runs the reader of a socket on the
    CPU of the thread that sends, which must not be that of an engine's steps.

    A frame to a peer that has died is lost. Each end must be open in its own process alone, because another
    copy would hide the end-of-file.
    """

    def __init__(self, end: socket.socket) -> None:
        """Takes `end` over: `close` closes it."""
        end.setblocking(False)
        self._socket = end
        self._lock = threading.Lock()  # of the outgoing frames, and of closing the descriptors under a `send`
        self._outgoing: deque[memoryview] = deque()
        self._num_queued_bytes = 0
        self._closed = False
        self._woken = False
        self._is_waiting = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._incoming = bytearray()
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._watched: dict[int, Callable[[], object]] = {}
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)

    @classmethod
    def inherited(cls, number: int) -> Channel:
        """The end that a parent passed to this process as a descriptor of this number."""
        end = socket.socket(fileno=number)
        end.set_inheritable(False)
        return cls(end)

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    @property
    def num_queued_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._num_queued_bytes

    def send(self, payload: bytes) -> None:
        """Sends a frame, or queues it. Raises ValueError above FRAME_BYTES_MAX."""
        if len(payload) > FRAME_BYTES_MAX:
            raise ValueError(f"a message of {len(payload)} bytes, at most {FRAME_BYTES_MAX} may be sent")
        with self._lock:
            if self._closed:
                return
            frame = memoryview(_LENGTH.pack(len(payload)) + payload)
            self._outgoing.append(frame)
            self._num_queued_bytes += len(frame)
            if not self._is_waiting:
                self._send_queued()
            if self._num_queued_bytes > QUEUED_BYTES_MAX:
                self._give_up()
            if self._is_waiting and self._outgoing:
                os.eventfd_write(self._wakeup, 1)

    def wake(self) -> None:
        """Makes `receive` return now, or the next time."""
        with self._lock:
            if not self._closed:
                self._woken = True
                os.eventfd_write(self._wakeup, 1)

    def watch(self, number: int, is_ready: Callable[[], object]) -> None:
        """Calls `is_ready` in `receive` whenever this descriptor can be read, or has ended, until
        `unwatch`."""
        self._watched[number] = is_ready
        self._poll.register(number, select.POLLIN)

    def unwatch(self, number: int) -> None:
        """Undoes `watch`."""
        del self._watched[number]
        self._poll.unregister(number)

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Waits for whole frames and returns them; none after `timeout_s` or a `wake`.

        Raises EOFError once the peer has died and all that it sent has been returned, FrameError for a frame
        above FRAME_BYTES_MAX.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ready = self._wait(0.0 if self._woken else left_s, select.POLLIN)
            if self._socket.fileno() in ready and (frames := self._read()):
                return frames
            with self._lock:
                woken, self._woken = self._woken, False
            if woken or left_s == 0.0:
                return []

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything queued has left; False if it has not after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self._outgoing:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait(left_s, 0)
        return True

    def close(self) -> None:
        """Closes this end, which is its death to the peer; what is queued is lost. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_queued()
            self._socket.close()
            os.close(self._wakeup)

    def _wait(self, timeout_s: float | None, events: int) -> dict[int, int]:
        """Waits for something to do, does all of it but reading frames; returns what is ready."""
        with self._lock:
            self._is_waiting = True
            events |= select.POLLOUT if self._outgoing else 0
        self._poll.register(self._socket, events)
        # Rounded up: a wait of less than a millisecond must not become a busy loop.
        ready = dict(self._poll.poll(None if timeout_s is None else int(timeout_s * 1000) + (timeout_s > 0)))
        with self._lock:
            self._is_waiting = False
            self._send_queued()
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        for number in self._watched.keys() & ready.keys():
            self._watched[number]()
        return ready

    def _read(self) -> list[bytes]:
        """The frames that have come whole with the next bytes."""
        try:
            n_bytes = self._socket.recv_into(self._chunk)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:  # reset: it died with frames of ours unread
            n_bytes = 0
        if n_bytes == 0:
            raise EOFError("the peer has died")
        incoming, frames, begin = self._incoming, list[bytes](), 0
        incoming += self._chunk[:n_bytes]
        while len(incoming) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(incoming, begin)
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a frame of {length} bytes, at most {FRAME_BYTES_MAX} may come")
            end = begin + _LENGTH.size + length
            if end > len(incoming):
                break
            frames.append(bytes(memoryview(incoming)[begin + _LENGTH.size : end]))
            begin = end
        del incoming[:begin]
        return frames

    def _send_queued(self) -> None:
        """As much as the kernel takes now. The caller has the lock."""
        while self._outgoing:
            frame = self._outgoing[0]
            try:
                n_bytes = self._socket.send(frame, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # it has died, which `receive` finds out
                self._give_up()
                return
            self._num_queued_bytes -= n_bytes
            if n_bytes == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = frame[n_bytes:]

    def _give_up(self) -> None:
        """Ends the connection: a frame that is lost must not be followed by others. What the peer sent before
        can still be read."""
        self._drop_queued()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer has done so
            return

    def _drop_queued(self) -> None:
        self._outgoing.clear()
        self._num_queued_bytes = 0
