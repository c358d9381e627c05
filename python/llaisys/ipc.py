"""Channel: messages between two processes of this machine, as frames over a pair of connected Unix sockets.

A frame is a length (4 bytes, little-endian) and that many bytes. Sending never waits: bytes that the kernel
does not accept are queued, and sent when the same end receives or sends again. End-of-file means that the
peer has died.
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

# Maximum bytes of a frame in both directions, far above useful sizes of tokenizer files and request bodies.
FRAME_BYTES_MAX = 512 << 20
# Maximum bytes that are queued for a peer that does not read. Messages belong to open requests, so only a
# stopped peer reaches this limit; it is then treated as dead.
QUEUED_BYTES_MAX = 1 << 30
_READ_BYTES = 256 << 10
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The peer sent an invalid frame."""


class Channel:
    """One end of the pair. Only `send` and `wake` may be called on other threads than the receiving one.

    While the receiving thread waits, it sends for the other threads. The kernel runs the reader of a socket
    on the CPU of the sending thread, which must not be the CPU of an engine's steps.

    A frame to a dead peer is lost. Each end must be open in one process only, because another copy would hide
    the end-of-file.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take ownership of the socket `end`; `close` closes it."""
        end.setblocking(False)
        self._socket = end
        # Protects the outgoing frames, and the descriptors from being closed during a `send`.
        self._lock = threading.Lock()
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
    def inherited(cls, fd: int) -> Channel:
        """Return the end that the parent has passed to this process as file descriptor `fd`."""
        end = socket.socket(fileno=fd)
        end.set_inheritable(False)
        return cls(end)

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    @property
    def num_queued_bytes(self) -> int:
        """Number of bytes that the kernel has not accepted yet."""
        return self._num_queued_bytes

    def send(self, payload: bytes) -> None:
        """Send a frame, or queue it. Raises ValueError above FRAME_BYTES_MAX."""
        if len(payload) > FRAME_BYTES_MAX:
            raise ValueError(f"the message has {len(payload)} bytes, at most {FRAME_BYTES_MAX} can be sent")
        with self._lock:
            if self._closed:
                return
            frame = memoryview(_LENGTH.pack(len(payload)) + payload)
            self._outgoing.append(frame)
            self._num_queued_bytes += len(frame)
            if not self._is_waiting:
                self._send_queued()
            if self._num_queued_bytes > QUEUED_BYTES_MAX:
                self._disconnect()
            if self._is_waiting and self._outgoing:
                os.eventfd_write(self._wakeup, 1)

    def wake(self) -> None:
        """Make the current or next `receive` return."""
        with self._lock:
            if not self._closed:
                self._woken = True
                os.eventfd_write(self._wakeup, 1)

    def watch(self, fd: int, on_ready: Callable[[], object]) -> None:
        """Call `on_ready` in `receive` whenever a file descriptor is readable or closed, until `unwatch`."""
        self._watched[fd] = on_ready
        self._poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching a file descriptor."""
        del self._watched[fd]
        self._poll.unregister(fd)

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Wait for complete frames and return them; none after `timeout_s` or a `wake`.

        Raises EOFError once the peer has died and all its frames were returned, FrameError for a frame above
        FRAME_BYTES_MAX.
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
        """Wait up to `timeout_s` seconds until all queued bytes are sent; return False if they are not."""
        until_s = time.monotonic() + timeout_s
        while self._outgoing:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            self._wait(left_s, 0)
        return True

    def close(self) -> None:
        """Close this end, which the peer sees as end-of-file. Queued frames are lost. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_queued()
            self._socket.close()
            os.close(self._wakeup)

    def _wait(self, timeout_s: float | None, events: int) -> dict[int, int]:
        """Wait for events and handle all of them except reading frames; return the ready descriptors."""
        with self._lock:
            self._is_waiting = True
            events |= select.POLLOUT if self._outgoing else 0
        self._poll.register(self._socket, events)
        # Round up, so that a wait of less than a millisecond does not become a busy loop.
        ready = dict(self._poll.poll(None if timeout_s is None else int(timeout_s * 1000) + (timeout_s > 0)))
        with self._lock:
            self._is_waiting = False
            self._send_queued()
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        for fd in self._watched.keys() & ready.keys():
            self._watched[fd]()
        return ready

    def _read(self) -> list[bytes]:
        """Read the next bytes and return the frames that they complete."""
        try:
            n_bytes = self._socket.recv_into(self._chunk)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:  # connection reset: the peer has died without reading all our frames
            n_bytes = 0
        if n_bytes == 0:
            raise EOFError("the peer has died")
        incoming, frames, begin = self._incoming, list[bytes](), 0
        incoming += self._chunk[:n_bytes]
        while len(incoming) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(incoming, begin)
            if length > FRAME_BYTES_MAX:
                raise FrameError(f"a frame has {length} bytes, at most {FRAME_BYTES_MAX} are allowed")
            end = begin + _LENGTH.size + length
            if end > len(incoming):
                break
            frames.append(bytes(memoryview(incoming)[begin + _LENGTH.size : end]))
            begin = end
        del incoming[:begin]
        return frames

    def _send_queued(self) -> None:
        """Send as much as the kernel accepts now. The caller holds the lock."""
        while self._outgoing:
            frame = self._outgoing[0]
            try:
                n_bytes = self._socket.send(frame, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # the peer has died, which `receive` reports
                self._disconnect()
                return
            self._num_queued_bytes -= n_bytes
            if n_bytes == len(frame):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = frame[n_bytes:]

    def _disconnect(self) -> None:
        """Drop the queued frames and disconnect, because no frame may follow a lost one.

        Received frames can still be read.
        """
        self._drop_queued()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer has shut it down
            return

    def _drop_queued(self) -> None:
        self._outgoing.clear()
        self._num_queued_bytes = 0
