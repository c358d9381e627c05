"""HTTP over plain sockets, for clients that read at random, stop reading or disconnect."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPConnection
from random import Random
from typing import Any
from urllib.parse import urlsplit

from serving import Server


def connect(server: Server, *, receive_bytes: int | None = None) -> socket.socket:
    """Open a connection. `receive_bytes`: the kernel's buffer for bytes that have not been read."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((address.hostname, address.port))
    return connection


def head(server: Server, path: str, n_bytes: int) -> bytes:
    """Return the head of a POST of JSON."""
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {urlsplit(server.url).netloc}",
        "Content-Type: application/json",
        f"Content-Length: {n_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def ask(
    server: Server, path: str, body: dict[str, Any], *, receive_bytes: int | None = None
) -> socket.socket:
    """Send a request, and leave the response unread in the socket."""
    raw = json.dumps(body).encode()
    connection = connect(server, receive_bytes=receive_bytes)
    connection.sendall(head(server, path, len(raw)) + raw)
    return connection


def until_read(connection: socket.socket, text: bytes) -> None:
    """Read until the text has arrived."""
    seen = b""
    while text not in seen:
        part = connection.recv(65536)
        assert part, seen
        seen += part


def read_at_random(server: Server, path: str, body: dict[str, Any], seed: int) -> bytes:
    """Return the body of a response with status 200, read in pieces of random sizes with random delays."""
    random = Random(seed)
    address = urlsplit(server.url)
    connection = HTTPConnection(address.netloc)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        raw = b""
        while part := answer.read1(random.choice((1, 7, 100, 4096))):
            raw += part
            if random.random() < 0.1:
                time.sleep(random.random() * 0.01)  # a slow reader is what is tested
        assert answer.status == 200, raw
        return raw
    finally:
        connection.close()
