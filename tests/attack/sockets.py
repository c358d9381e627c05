"""Connections: idle, half-closed, reset, stalled."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterable, Iterator

from attack.target import Group, Reply, Target

GROUP = Group("sockets")
STREAM = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5}


def _reset(client: socket.socket) -> None:
    """Close with a RST instead of a FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _connections(target: Target, n: int, first: bytes = b"") -> Iterator[socket.socket]:
    """Yield up to `n` connections, without those that the server refuses."""
    for _ in range(n):
        with contextlib.suppress(OSError):
            client = target.connect()
            client.sendall(first)
            yield client


@contextlib.contextmanager
def opened(
    target: Target, raws: Iterable[bytes], receive_bytes: int | None = None
) -> Iterator[list[socket.socket]]:
    """Send requests and leave their responses unread until the end of the block; skip refused connections."""
    with contextlib.ExitStack() as stack:
        clients = []
        for raw in raws:
            with contextlib.suppress(OSError):
                client = stack.enter_context(contextlib.closing(target.connect(receive_bytes)))
                client.sendall(raw)
                clients.append(client)
        yield clients


@GROUP.case(200, is_long=True)
def fifteen_hundred_idle_connections(target: Target) -> Iterator[Reply]:
    """While they are open, probes and requests get responses."""
    with opened(target, [b""] * 1500):
        for _ in range(10):
            yield target.get("/livez", key=None)
            yield target.get("/v1/models")


@GROUP.case(200, is_long=True)
def fifteen_hundred_unfinished_heads(target: Target) -> Iterator[Reply]:
    with opened(target, [b"GET /livez HTTP/1.1\r\nHost: a"] * 1500):
        for _ in range(10):
            yield target.get("/livez", key=None)


@GROUP.case(200)
def two_thousand_connections_opened_and_closed(target: Target) -> Iterator[Reply]:
    for client in _connections(target, 2000):
        client.close()
    yield target.get("/livez", key=None)


@GROUP.case(200)
def five_hundred_resets_within_a_head(target: Target) -> Iterator[Reply]:
    for client in _connections(target, 500, b"GET /livez HT"):
        _reset(client)
    yield target.get("/livez", key=None)


@GROUP.case(200)
def resets_within_a_body(target: Target) -> Iterator[Reply]:
    head = target.head("POST", "/v1/completions", "Content-Length: 100000", "Content-Type: application/json")
    for client in _connections(target, 100, head + b'{"prompt":'):
        _reset(client)
    yield target.get("/livez", key=None)


@GROUP.case(200)
def resets_within_a_stream(target: Target) -> Iterator[Reply]:
    raw = target.request("POST", "/v1/completions", json.dumps(STREAM).encode())
    for client in _connections(target, 30, raw):
        with contextlib.suppress(OSError):
            client.recv(1)
        _reset(client)
    yield target.get("/livez", key=None)


@GROUP.case(200)
def a_client_that_closes_its_sending_side(target: Target) -> Iterator[Reply]:
    body = json.dumps({"prompt": "a", "max_tokens": 8, "ignore_eos": True}).encode()
    reply = target.send(target.request("POST", "/v1/completions", body), half_close=True)
    assert b'"finish_reason":"length"' in reply.head, reply.head
    yield reply


@GROUP.case(200, is_long=True)
def thirty_streams_that_nobody_reads(target: Target) -> Iterator[Reply]:
    raw = target.request("POST", "/v1/completions", json.dumps(STREAM).encode())
    with opened(target, [raw] * 30, receive_bytes=2048):
        yield target.get("/livez", key=None)
        yield target.get("/v1/models")


@GROUP.case(200, is_long=True)
def large_responses_that_nobody_reads(target: Target) -> Iterator[Reply]:
    body = {"prompt": [[3] * 300] * 4, "prompt_logprobs": 20, "max_tokens": 1}
    raw = target.request("POST", "/v1/completions", json.dumps(body).encode())
    with opened(target, [raw] * 6, receive_bytes=2048):
        for _ in range(5):
            yield target.get("/livez", key=None)
