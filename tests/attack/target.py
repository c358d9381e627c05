"""The server under attack, which gets raw bytes, and the type of a case."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# A guard against a server that never replies; the driver measures the time.
PATIENCE_S = 240.0
REPLY_BYTES_MAX = 256 << 20

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply on one connection: the status of the last response, or None if it was closed without one.

    `n_bytes`: the number of bytes received; `head`: the first 64 KiB.
    """

    status: int | None
    n_bytes: int
    head: bytes

    @property
    def body(self) -> bytes:
        """The first 64 KiB after the head of the first response."""
        return self.head.partition(b"\r\n\r\n")[2]


@dataclass(frozen=True, slots=True)
class Target:
    """A server: its address, its process, and the keys of the attacker and of another client."""

    host: str
    port: int
    pid: int
    key: str
    other_key: str

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """Open a connection. `receive_bytes`: the size of its receive buffer."""
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(PATIENCE_S)
        client.connect((self.host, self.port))
        return client

    def send(self, *pieces: bytes, half_close: bool = False) -> Reply:
        """Send pieces on a new connection, and read until it is closed or a response is complete."""
        with contextlib.closing(self.connect()) as client:
            for piece in pieces:
                with contextlib.suppress(OSError):  # the server may close the connection early
                    client.sendall(piece)
            if half_close:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_WR)
            return read_reply(client)

    def head(self, method: str, path: str, *lines: str, key: str | None = "") -> bytes:
        """Return the head of a request. `key` "": that of the attacker; None: no key."""
        if key is not None:
            lines = (f"Authorization: Bearer {key or self.key}", *lines)
        text = "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", *lines, "", ""))
        return text.encode("latin-1")

    def request(self, method: str, path: str, body: bytes = b"", key: str | None = "") -> bytes:
        """Return a whole request that closes its connection after the response."""
        lines = ["Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        return self.head(method, path, *lines, key=key) + body

    def post(self, path: str, body: Any, key: str | None = "") -> Reply:
        """Post JSON, or bytes that may be invalid."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(self.request("POST", path, raw, key))

    def get(self, path: str, key: str | None = "") -> Reply:
        """Get a path."""
        return self.send(self.request("GET", path, key=key))


def read_reply(client: socket.socket) -> Reply:
    """Read until the peer closes the connection, or a response of known length is complete."""
    head, n_bytes = bytearray(), 0
    try:
        while n_bytes < REPLY_BYTES_MAX:
            piece = client.recv(1 << 18)
            if not piece:
                break
            n_bytes += len(piece)
            head += piece[: max(0, (64 << 10) - len(head))]
            if _is_whole(head, n_bytes):
                break
    except TimeoutError:
        raise AssertionError(
            f"no end of the reply within {PATIENCE_S:.0f} s: {bytes(head[:200])!r}"
        ) from None
    except OSError:  # a reset closes the connection, too
        pass
    found = _STATUS.findall(bytes(head))
    return Reply(int(found[-1]) if found else None, n_bytes, bytes(head))


def _is_whole(head: bytearray, n_bytes: int) -> bool:
    first, separator, _ = bytes(head).partition(b"\r\n\r\n")
    if not separator:
        return False
    length = re.search(rb"(?im)^content-length: *(\d+)", first)
    return length is not None and n_bytes >= len(first) + 4 + int(length[1])


Attack: TypeAlias = Callable[[Target], Iterable[Reply]]


@dataclass(frozen=True, slots=True)
class Case:
    """`allowed`: statuses of correct replies; None: closed without a response.

    `is_long`: too expensive for `make test`.
    """

    group: str
    name: str
    attack: Attack
    allowed: frozenset[int | None]
    is_long: bool = False

    def check(self, replies: Iterable[Reply]) -> int:
        """Return the number of replies. Raises AssertionError for one that is not allowed."""
        n = 0
        for n, reply in enumerate(replies, 1):  # noqa: B007 -- counted
            assert reply.status in self.allowed, (self.name, reply.status, reply.head[:300])
        return n


@dataclass(slots=True)
class Group:
    """The cases of one module."""

    name: str
    cases: list[Case] = field(default_factory=list)

    def add(self, name: str, attack: Attack, *allowed: int | None, is_long: bool = False) -> None:
        """Add a case."""
        self.cases.append(Case(self.name, name, attack, frozenset(allowed), is_long))

    def case(self, *allowed: int | None, is_long: bool = False) -> Callable[[Attack], Attack]:
        """Add the decorated function as a case with its name."""

        def added(attack: Attack) -> Attack:
            self.add(attack.__name__, attack, *allowed, is_long=is_long)
            return attack

        return added

    def one(
        self, name: str, make: Callable[[Target], Reply], *allowed: int | None, is_long: bool = False
    ) -> None:
        """Add a case with one reply."""

        def attack(target: Target) -> Iterator[Reply]:
            yield make(target)

        self.add(name, attack, *allowed, is_long=is_long)
