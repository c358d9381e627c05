"""KV events over ZeroMQ: what a router of a fleet sees of a server's prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from golden import FOLDER
from llaisys.config import KvEventsConfig
from llaisys.engine.kv_event_publisher import KvEventPublisher
from llaisys.engine.prefix_cache import AddNode
from llaisys.errors import RejectedError
from serving import Server, serving
from waiting import block_until

CELLS = 160
WAIT_MS = 60_000
CLEARED = {"type": "AllBlocksCleared"}
FLAGS = ("--num-kv-cells", str(CELLS), "--dtype", "float32", "--max-num-batched-tokens", "64")


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return a configuration whose sockets are files in `folder`."""
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv",
        **more,
    }


@contextmanager
def connected(folder: Path, kind: int, name: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.rcvtimeo = WAIT_MS
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(f"ipc://{folder}/{name}")
        yield socket


def replayed(folder: Path, first: int = 0) -> list[tuple[int, list[Any]]]:
    """Return number and events of every kept batch from `first` on."""
    found = []
    with connected(folder, zmq.DEALER, "replay") as socket:
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            *topic, number, batch = socket.recv_multipart()[1:]
            if not batch:
                assert int.from_bytes(number, "big", signed=True) == -1
                return found
            assert topic == [b"kv"]
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1]))


def replayed_events(folder: Path) -> list[Any]:
    return [event for _, events in replayed(folder) for event in events]


def complete(server: Server, token: int) -> list[int]:
    """Complete a prompt of 100 equal tokens; return prompt and output."""
    body = {"prompt": [token] * 100, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = server.http.post("/v1/completions", json={**body, "ignore_eos": True}).json()
    return [*answer["choices"][0]["prompt_token_ids"], *answer["choices"][0]["token_ids"]]


@pytest.mark.parametrize("process", [(), ("--engine-process",)])
def test_a_router_follows_the_prefix_cache(tmp_path: Path, process: tuple[str, ...]) -> None:
    config = json.dumps(settings(tmp_path))
    with serving(tmp_path, FOLDER, *FLAGS, *process, "--kv-events-config", config) as server:
        assert replayed_events(tmp_path) == [CLEARED]
        tokens = complete(server, 5)
        # The last output token has no K and V.
        n_blocks = (len(tokens) - 1) // 16

        def stored() -> list[Any]:
            return [event for event in replayed_events(tmp_path) if event["type"] == "BlockStored"]

        # The batch of the last step may follow the response.
        block_until(lambda: sum(len(event["block_hashes"]) for event in stored()) == n_blocks)
        assert [token for event in stored() for token in event["token_ids"]] == tokens[: n_blocks * 16]
        assert stored()[0]["parent_block_hash"] is None
        hashes = [each for event in stored() for each in event["block_hashes"]]
        assert [event["parent_block_hash"] for event in stored()[1:]] == [
            hashes[len(stored()[0]["block_hashes"]) - 1]
        ] * (len(stored()) - 1)
        complete(server, 6)  # needs the cells of the first prompt
        removed = [
            each
            for event in replayed_events(tmp_path)
            if event["type"] == "BlockRemoved"
            for each in event["block_hashes"]
        ]
        assert removed
        assert set(removed) == set(hashes[-len(removed) :])
        if process:
            (engine,) = (
                child
                for child in psutil.Process(server.process.pid).children()
                if "llaisys.engine.process_main" in " ".join(child.cmdline())
            )
            engine.kill()
            block_until(lambda: replayed(tmp_path) == [(0, [CLEARED])])


def test_a_subscriber_gets_numbered_batches_and_can_ask_for_missed_ones(tmp_path: Path) -> None:
    publisher = KvEventPublisher(KvEventsConfig(**settings(tmp_path, buffer_steps=4)))
    try:
        assert replayed_events(tmp_path) == [CLEARED]  # it was sent before anyone subscribes
        with connected(tmp_path, zmq.SUB, "events") as subscriber:
            # Publish until the subscription has arrived: ZeroMQ has no sign of it.
            poller, node = zmq.Poller(), 0
            poller.register(subscriber, zmq.POLLIN)
            while not poller.poll(20):
                node += 1
                publish(publisher, node)
            topic, number, batch = subscriber.recv_multipart()
            assert topic == b"kv"
            seconds, events, rank = msgspec.msgpack.decode(batch)
            assert (events[0]["token_ids"], rank) == ([int.from_bytes(number, "big")] * 16, 0)
            assert seconds > 1.7e9
            while int.from_bytes(number, "big") < node:
                _, number, _ = subscriber.recv_multipart()
            last = node + 3
            while node < last:
                node += 1
                publish(publisher, node)
            numbers = [int.from_bytes(subscriber.recv_multipart()[1], "big") for _ in range(3)]
            assert numbers == [last - 2, last - 1, last]
        assert [number for number, _ in replayed(tmp_path)] == [last - 3, last - 2, last - 1, last]
        assert [number for number, _ in replayed(tmp_path, last)] == [last]
        assert replayed(tmp_path, last + 1) == []
    finally:
        publisher.close()


def publish(publisher: KvEventPublisher, node: int) -> None:
    """Publish a block whose tokens are the number of its batch."""
    publisher.blocks.apply([AddNode(node, 0, 16)], "", [node] * 16)
    publisher.publish()


def test_a_malformed_replay_request_is_ignored(tmp_path: Path) -> None:
    publisher = KvEventPublisher(KvEventsConfig(**settings(tmp_path)))
    try:
        with connected(tmp_path, zmq.DEALER, "replay") as socket:
            for frames in ([b""], [b"x"], [b"", b"short"], [b"", b"0" * 8, b"more"], [b"x", b"0" * 8]):
                socket.send_multipart(frames)
        assert replayed_events(tmp_path) == [CLEARED]
    finally:
        publisher.close()


def test_an_endpoint_in_use_is_rejected_by_name(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(RejectedError, match="in use") as error:
            KvEventPublisher(KvEventsConfig(**settings(tmp_path, replay_endpoint=f"tcp://127.0.0.1:{port}")))
    assert error.value.param == "kv_events_config"
