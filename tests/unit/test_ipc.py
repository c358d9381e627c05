"""Frames between two processes: complete, in order, without waiting senders; a dead peer is detected."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from llaisys import ipc
from llaisys.ipc import Channel, FrameError
from waiting import block_until

SEED = 18
SECOND = 30.0  # an upper bound that is reached only if a test hangs


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """Return a channel and the plain socket of its peer."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def received(channel: Channel, n: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < n:
        frames += channel.receive(SECOND)
    return frames


def test_frames_of_every_size_arrive_whole_and_in_order() -> None:
    chance = random.Random(SEED)
    sizes = [0, 1, 4, ipc._READ_BYTES - 4, ipc._READ_BYTES, 5_000_000]
    sent = [chance.randbytes(size) for size in [*sizes, *(chance.randrange(70_000) for _ in range(200))]]
    left, right = (Channel(end) for end in socket.socketpair())
    back: list[bytes] = []

    def answer() -> None:
        for _ in range(len(sent)):
            while len(back) < len(sent):
                for each in right.receive(SECOND):
                    back.append(each)
                    right.send(each)
        assert right.flush(SECOND)

    thread = threading.Thread(target=answer)
    thread.start()
    for each in sent:
        left.send(each)
    assert received(left, len(sent)) == sent, f"seed {SEED}"
    thread.join()
    assert back == sent, f"seed {SEED}"
    left.close()
    right.close()


def test_a_frame_in_single_bytes(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    for byte in frame(b"one") + frame(b"two"):
        peer.sendall(bytes([byte]))
        frames = channel.receive(0.0)
        assert frames in ([], [b"one"], [b"two"])
    assert frames == [b"two"]
    peer.sendall(frame(b"a") * 3)
    assert channel.receive(SECOND) == [b"a"] * 3


def test_sending_never_waits_for_a_peer_that_does_not_read(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    for _ in range(100):
        channel.send(bytes(100_000))
    assert channel.num_queued_bytes > 9_000_000
    assert not channel.flush(0.0)
    n_bytes = 0
    peer.setblocking(False)
    while n_bytes < 100 * 100_004:  # queued frames are sent while this end receives
        assert channel.receive(0.0) == []
        n_bytes += len(peer.recv(1 << 20))
    assert channel.num_queued_bytes == 0


def test_the_receiving_thread_sends_frames_of_the_others(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    sent = [bytes([i]) * 50_000 for i in range(40)]
    waiting = threading.Thread(target=channel.receive, args=(SECOND,))
    waiting.start()
    block_until(lambda: channel._is_waiting)
    for each in sent:
        channel.send(each)
    raw = b""
    while len(raw) < 40 * 50_004:
        raw += peer.recv(1 << 20)
    assert raw == b"".join(map(frame, sent))
    channel.wake()
    waiting.join()


def test_a_dead_peer_is_the_end_after_all_frames_that_it_sent(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    channel.send(b"never read")  # so that the peer's end is a reset
    peer.sendall(frame(b"last") + frame(b"word") + frame(b"cut off")[:-1])
    peer.close()
    assert channel.receive(SECOND) == [b"last", b"word"]
    for _ in range(2):
        with pytest.raises(EOFError):
            channel.receive(SECOND)


def test_a_frame_to_a_dead_peer_is_lost_and_its_last_frames_are_not(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, peer = ends
    channel.send(bytes(1 << 20))
    peer.sendall(frame(b"last word"))
    peer.close()
    for _ in range(3):
        channel.send(b"lost")
    assert channel.num_queued_bytes == 0
    assert channel.flush(SECOND)
    assert channel.receive(SECOND) == [b"last word"]
    with pytest.raises(EOFError):
        channel.receive(SECOND)


def test_a_closed_channel_drops_frames_and_its_peer_sees_the_end(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, peer = ends
    channel.close()
    channel.close()
    channel.send(b"lost")
    channel.wake()
    assert peer.recv(1) == b""


def test_frames_are_bounded(ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "FRAME_BYTES_MAX", 10)
    channel, peer = ends
    with pytest.raises(ValueError, match="11 bytes, at most 10"):
        channel.send(bytes(11))
    assert channel.num_queued_bytes == 0
    peer.sendall(frame(bytes(10)))
    assert channel.receive(SECOND) == [bytes(10)]
    peer.sendall((11).to_bytes(4, "little"))  # rejected at its first bytes
    with pytest.raises(FrameError, match="11 bytes"):
        channel.receive(SECOND)


def test_a_peer_with_too_many_queued_bytes_is_disconnected(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "QUEUED_BYTES_MAX", 1 << 20)
    channel, peer = ends
    peer.sendall(frame(b"sent before"))
    queued = [0]
    for _ in range(100):
        channel.send(bytes(100_000))
        queued.append(channel.num_queued_bytes)
    assert 900_000 < max(queued) <= 1 << 20
    assert queued[-1] == 0
    assert channel.receive(SECOND) == [b"sent before"]
    with pytest.raises(EOFError):
        channel.receive(SECOND)
    while peer.recv(1 << 20):  # the peer sees the end too
        pass


def test_a_wake_ends_the_wait_from_another_thread(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    thread = threading.Thread(target=channel.wake)
    thread.start()
    assert channel.receive(SECOND) == []
    thread.join()
    channel.wake()
    peer.sendall(frame(b"news"))
    assert [*channel.receive(SECOND), *channel.receive(SECOND)] == [b"news"]


def test_receive_also_waits_for_another_descriptor(ends: tuple[Channel, socket.socket]) -> None:
    channel, peer = ends
    reader, writer = os.pipe()
    pieces: list[bytes] = []
    channel.watch(reader, lambda: pieces.append(os.read(reader, 100)))
    os.write(writer, b"line")
    assert channel.receive(0.0) == []
    os.close(writer)
    assert channel.receive(0.0) == []
    assert pieces == [b"line", b""]
    channel.unwatch(reader)
    os.close(reader)
    peer.sendall(frame(b"news"))
    assert channel.receive(SECOND) == [b"news"]
    assert len(pieces) == 2
