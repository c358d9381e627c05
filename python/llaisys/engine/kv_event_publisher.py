"""KvEventPublisher: publishes the events of the prefix cache over ZeroMQ, in vLLM's wire format.

Messages have the frames topic, sequence number (8 bytes, big-endian) and batch (msgpack). A subscriber that
misses a number asks the replay socket for the batches from a number on, and gets the same messages, then a
message with the number -1. Source: vLLM's `docs/features/kv_events.md`. Needs the extra `kv-events` (pyzmq).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from llaisys.config import KvEventsConfig
from llaisys.engine.kv_blocks import AllBlocksCleared, KvBlocks, KvEvent, KvEventBatch
from llaisys.errors import RejectedError

log = logging.getLogger(__name__)

# Bytes of the batches that are kept for the replay socket, in addition to the bound on their number.
REPLAY_BYTES_MAX = 64 << 20
_SEQUENCE_BYTES = 8
# The sequence number that ends a replay.
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)


class KvEventPublisher:
    """Publishes the changes of `blocks`. A thread of its own owns the public sockets.

    The engine thread makes every call. None of them waits: a batch that finds the queue full is dropped, and
    its sequence number is missing then. Raises RejectedError if an endpoint cannot be used.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self.blocks = KvBlocks()
        self._context = zmq.Context()
        self._next_number = 0
        self._n_dropped = 0
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._pub = self._context.socket(zmq.PUB)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            # A batch waits in either of the two queues.
            self._inbox.set_hwm(max(1, config.max_queue_size // 2))
            self._outbox.set_hwm(max(1, config.max_queue_size // 2))
            self._inbox.bind("inproc://batches")
            self._outbox.connect("inproc://batches")
            self._pub.set_hwm(config.hwm)
            _open(self._pub, config.endpoint, binds=_is_bound(config.endpoint))
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set_hwm(config.buffer_steps + 1)
                _open(self._replay, config.replay_endpoint, binds=True)
        except RejectedError:
            self._context.destroy(linger=0)
            raise
        self._topic = config.topic.encode()
        self._recent = _Recent(config.buffer_steps)
        self._thread = threading.Thread(target=self._run, name="llaisys-kv-events", daemon=True)
        self._thread.start()
        self._send([AllBlocksCleared()])  # subscribers may know the blocks of an engine before this one

    def publish(self) -> None:
        """Publish the changes since the last call as one batch; nothing if there are none."""
        if events := self.blocks.take_events():
            self._send(events)

    def close(self) -> None:
        """Send what waits, and close the sockets; idempotent."""
        if self._thread.is_alive():
            self._outbox.send(b"")
            self._thread.join()
        self._context.destroy(linger=0)

    def _send(self, events: Sequence[KvEvent]) -> None:
        number = self._next_number.to_bytes(_SEQUENCE_BYTES, "big")
        self._next_number += 1
        batch = msgspec.msgpack.encode(KvEventBatch(time.time(), list(events)))
        try:
            self._outbox.send_multipart((number, batch), zmq.NOBLOCK)
        except zmq.Again:
            self._n_dropped += 1
            if self._n_dropped.bit_count() == 1:  # at 1, 2, 4, 8, ...
                log.warning("the queue of KV events is full; %d batches were dropped", self._n_dropped)

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is not self._inbox:
                    self._send_again(socket)
                    continue
                frames = self._inbox.recv_multipart()
                if len(frames) == 1:
                    return
                number, batch = frames
                self._pub.send_multipart((self._topic, number, batch))
                self._recent.add(number, batch)

    def _send_again(self, socket: zmq.Socket[bytes]) -> None:
        """Answer a replay request: the client's identity, an empty frame, and the first number it wants."""
        client, *rest = socket.recv_multipart()
        if len(rest) != 2 or rest[0] or len(rest[1]) != _SEQUENCE_BYTES:
            log.warning("ignored a malformed replay request of %d frames", 1 + len(rest))
            return
        for number, batch in self._recent.since(rest[1]):
            socket.send_multipart((client, b"", self._topic, number, batch))
        socket.send_multipart((client, b"", _END, b""))


class _Recent:
    """The newest batches with their sequence numbers, at most `n_max` and REPLAY_BYTES_MAX bytes."""

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._batches: deque[tuple[bytes, bytes]] = deque()
        self._n_bytes = 0

    def add(self, number: bytes, batch: bytes) -> None:
        self._batches.append((number, batch))
        self._n_bytes += len(batch)
        while len(self._batches) > self._n_max or self._n_bytes > REPLAY_BYTES_MAX:
            self._n_bytes -= len(self._batches.popleft()[1])

    def since(self, first: bytes) -> list[tuple[bytes, bytes]]:
        """Return the batches from a number on; big-endian numbers have the order of their bytes."""
        return [each for each in self._batches if each[0] >= first]


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _open(socket: zmq.Socket[bytes], endpoint: str, *, binds: bool) -> None:
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise RejectedError(
            f"kv_events_config cannot use the endpoint {endpoint!r}: {error}", param="kv_events_config"
        ) from None
