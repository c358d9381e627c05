"""Responses that are not streams, serialized and sent in pieces. Other tasks run between two pieces, and
sending waits for a slow client.

A response is kept as JSON until its end: the bytes are counted, and take a tenth of the memory of the values.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.errors import ExhaustedError, RejectedError
from llaisys.server.errors import to_json
from llaisys.shares import Shares

PIECE_BYTES = 64 << 10
# Numbers or tokens' texts of a list that are made JSON at a time.
SLICE_ITEMS = 8192
Part: TypeAlias = bytes | bytearray


class JsonList:
    """The inside of a JSON list that grows."""

    def __init__(self) -> None:
        self.data = bytearray()

    def extend(self, values: Sequence[Any]) -> int:
        """Adds values; returns the bytes that the answer has grown by."""
        before = len(self.data)
        if values:
            if self.data:
                self.data += b","
            self.data += to_json(values)[1:-1]
        return len(self.data) - before


class JsonText:
    """The inside of a JSON string that grows."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, text: str) -> int:
        """Adds a text; returns the bytes that the answer has grown by."""
        before = len(self.data)
        self.data += to_json(text)[1:-1]
        return len(self.data) - before


class ResponseBytes:
    """The bytes of all whole answers that are being made or sent. Event loop only."""

    def __init__(self, n_most: int, n_most_in_flight: int, n_clients: int = 1) -> None:
        """`n_most`: of one answer. `n_most_in_flight`: of all together, in which each client has a part."""
        self.n_most = n_most
        self._shares = Shares(n_most_in_flight, n_clients)
        self._held: Counter[str] = Counter()

    @property
    def n_in_flight(self) -> int:
        """Bytes of all answers."""
        return self._held.total()

    def add(self, n_bytes: int, n_before: int, client_id: str = "") -> None:
        """Counts more bytes of a client's answer that has `n_before`. Raises RejectedError if it becomes too
        large, ExhaustedError if all together do, or those of the client."""
        if n_before + n_bytes > self.n_most:
            raise RejectedError(
                f"the answer has more than {self.n_most} bytes (max_response_bytes): ask for fewer tokens, "
                "choices or logprobs in one request, or set stream"
            )
        if not self._shares.allows(self._held, client_id, n_bytes):
            raise ExhaustedError(
                f"the answers of all requests have more than {self._shares.bound} bytes, "
                f"or those of a client more than {self._shares.most} "
                "(max_response_bytes_in_flight): try again in a moment, or set stream"
            )
        self._held[client_id] += n_bytes

    def remove(self, n_bytes: int, client_id: str = "") -> None:
        """A client's answer of so many bytes was sent, or given up."""
        self._held[client_id] -= n_bytes
        if not self._held[client_id]:
            del self._held[client_id]


async def send_parts(send: Send, headers: Mapping[str, str], parts: Sequence[Part]) -> None:
    """A JSON answer with status 200. Each piece waits until the client has taken most of those before it."""
    n_left = sum(map(len, parts))
    headers = {"content-type": "application/json", "content-length": str(n_left), **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    for piece in pieces(parts):
        n_left -= len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": n_left > 0})
        await asyncio.sleep(0)


def pieces(parts: Sequence[Part]) -> Iterator[bytes]:
    """The same bytes, between one and two times PIECE_BYTES at a time but for the last."""
    piece = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            piece += part[at : at + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


async def listed(values: Sequence[Any]) -> bytearray:
    """The inside of a JSON list of numbers or short texts, however many."""
    made = JsonList()
    for at in range(0, len(values), SLICE_ITEMS):
        made.extend(values[at : at + SLICE_ITEMS])
        await asyncio.sleep(0)
    return made.data


async def quoted(text: str) -> bytearray:
    """The inside of a JSON string, however long."""
    made = JsonText()
    for at in range(0, len(text), PIECE_BYTES):
        made.add(text[at : at + PIECE_BYTES])
        await asyncio.sleep(0)
    return made.data


class JsonParts(Response):
    """A JSON answer whose parts are there."""

    def __init__(self, parts: Sequence[Part], headers: Mapping[str, str]) -> None:
        super().__init__()
        self._parts = parts
        self._own_headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's signature
        """ASGI."""
        await send_parts(send, self._own_headers, self._parts)
