"""Bodies of responses that are not streamed: collected as JSON, counted, and sent in pieces.

Other tasks run between two pieces, and sending waits for a slow client. A response is collected as JSON,
because JSON can be counted and takes a tenth of the memory of Python objects.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llaisys.errors import ExhaustedError, RejectedError
from llaisys.server.http_errors import to_json
from llaisys.shares import Shares

PIECE_BYTES = 64 << 10
# Maximum numbers or token texts that are serialized at a time.
SLICE_ITEMS = 8192
LOGPROB_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
TEXTS = ("content", "reasoning", "reasoning_content")
# Bytes of a choice without its lists and texts: names, brackets and reasons.
CHOICE_BYTES = 256
# Fields of vLLM's objects that this server never sets. Its clients expect them.
VLLM_NULLS = {"service_tier": None, "kv_transfer_params": None}
Part: TypeAlias = bytes | bytearray
Json: TypeAlias = dict[str, Any]


class JsonList:
    """The content of a growing JSON list."""

    def __init__(self) -> None:
        self.data = bytearray()

    def extend(self, values: Sequence[Any]) -> int:
        """Add values; return by how many bytes the response has grown."""
        before = len(self.data)
        if values:
            if self.data:
                self.data += b","
            self.data += to_json(values)[1:-1]
        return len(self.data) - before


class JsonText:
    """The content of a growing JSON string."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, text: str) -> int:
        """Add a text; return by how many bytes the response has grown."""
        before = len(self.data)
        self.data += to_json(text)[1:-1]
        return len(self.data) - before


class ResponseBytes:
    """Counts the bytes of all open responses that are not streamed. Event loop only."""

    def __init__(self, bytes_max: int, bytes_in_flight_max: int, n_clients: int = 1) -> None:
        """`bytes_max`: limit of one response. `bytes_in_flight_max`: limit of all; each client has a
        share."""
        self.bytes_max = bytes_max
        self._shares = Shares(bytes_in_flight_max, n_clients)
        self._bytes_by_client: Counter[str] = Counter()

    @property
    def n_in_flight(self) -> int:
        """Return the bytes of all responses."""
        return self._bytes_by_client.total()

    def add(self, n_bytes: int, n_before: int, client_id: str = "") -> None:
        """Count further bytes of a client's response that has `n_before` bytes.

        Raises RejectedError if the response becomes too large, ExhaustedError if all responses or those of
        the client become too large.
        """
        if n_before + n_bytes > self.bytes_max:
            raise RejectedError(
                f"the response has more than {self.bytes_max} bytes (max_response_bytes): request fewer "
                "tokens, choices or logprobs, or set stream"
            )
        if not self._shares.allows(self._bytes_by_client, client_id, n_bytes):
            raise ExhaustedError(
                f"the responses of all requests have more than {self._shares.bound} bytes, "
                f"or those of one client more than {self._shares.maximum} "
                "(max_response_bytes_in_flight): try again in a moment, or set stream"
            )
        self._bytes_by_client[client_id] += n_bytes

    def remove(self, n_bytes: int, client_id: str = "") -> None:
        """Stop counting a client's response of `n_bytes` that was sent or dropped."""
        self._bytes_by_client[client_id] -= n_bytes
        if not self._bytes_by_client[client_id]:
            del self._bytes_by_client[client_id]


async def send_parts(send: Send, headers: Mapping[str, str], parts: Sequence[Part]) -> None:
    """Send a JSON response with status 200. Each piece waits until the client has read most previous
    pieces."""
    n_left = sum(map(len, parts))
    headers = {"content-type": "application/json", "content-length": str(n_left), **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    for piece in pieces(parts):
        n_left -= len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": n_left > 0})
        await asyncio.sleep(0)


def pieces(parts: Sequence[Part]) -> Iterator[bytes]:
    """Yield the bytes in pieces of one to two times PIECE_BYTES; the last may be smaller."""
    piece = bytearray()
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            piece += part[at : at + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


async def json_list(values: Sequence[Any]) -> bytearray:
    """Return the content of a JSON list of numbers or short texts. Yields to other tasks in between."""
    made = JsonList()
    for at in range(0, len(values), SLICE_ITEMS):
        made.extend(values[at : at + SLICE_ITEMS])
        await asyncio.sleep(0)
    return made.data


async def json_string(text: str) -> bytearray:
    """Return the content of a JSON string. Yields to other tasks in between."""
    made = JsonText()
    for at in range(0, len(text), PIECE_BYTES):
        made.add(text[at : at + PIECE_BYTES])
        await asyncio.sleep(0)
    return made.data


class JsonParts(Response):
    """A JSON response from parts."""

    def __init__(self, parts: Sequence[Part], headers: Mapping[str, str]) -> None:
        super().__init__()
        self._parts = parts
        self._own_headers = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's signature
        """Handle a request (ASGI)."""
        await send_parts(send, self._own_headers, self._parts)


class TextChoiceBuilder:
    """Builds a choice of a completion from its chunks: texts, ids and logprobs concatenated, the last end."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._text = JsonText()
        self._logprobs: dict[str, JsonList] = {}
        self._token_ids: JsonList | None = None
        self._end: Json = {"finish_reason": None, "stop_reason": None}

    def add(self, choice: Mapping[str, Any]) -> int:
        """Add the choice of a chunk; return the bytes that the response has grown by."""
        n_bytes = self._text.add(choice["text"])
        if choice["logprobs"] is not None:
            self._logprobs = self._logprobs or {name: JsonList() for name in LOGPROB_LISTS}
            n_bytes += sum(made.extend(choice["logprobs"][name]) for name, made in self._logprobs.items())
        if "token_ids" in choice:
            self._token_ids = self._token_ids or JsonList()
            n_bytes += self._token_ids.extend(choice["token_ids"])
        self._end = {name: choice[name] for name in self._end}
        return n_bytes

    def parts(self, more: Mapping[str, JsonList | None]) -> list[Part]:
        """Return the object. `more`: further lists, after its own fields; None is null."""
        out: list[Part] = [f'{{"index":{self.index},"text":"'.encode(), self._text.data, b'","logprobs":']
        out += _object(self._logprobs) if self._logprobs else [b"null"]
        out += [b",", to_json(self._end)[1:-1]]
        out += list_field("token_ids", self._token_ids)
        for name, value in more.items():
            out += list_field(name, value)
        return [*out, b"}"]


class ChatChoiceBuilder:
    """Builds a choice of a chat: its deltas as one message. Content is null for only reasoning or tool
    calls."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._texts: dict[str, JsonText] = {}
        self._calls: list[Json] = []
        self._logprobs = JsonList()
        self._token_ids: JsonList | None = None
        self._end: Json = {"finish_reason": None, "stop_reason": None}

    def add(self, choice: Mapping[str, Any]) -> int:
        """Add the choice of a chunk; return the bytes that the response has grown by."""
        delta, n_bytes = choice["delta"], 0
        for name in TEXTS:
            if delta.get(name):
                n_bytes += self._texts.setdefault(name, JsonText()).add(delta[name])
        for call in delta.get("tool_calls", ()):
            n_bytes += len(to_json(call))
            self._add_call(call)
        if choice["logprobs"] is not None:
            n_bytes += self._logprobs.extend(choice["logprobs"]["content"])
        if "token_ids" in choice:
            self._token_ids = self._token_ids or JsonList()
            n_bytes += self._token_ids.extend(choice["token_ids"])
        self._end = {name: choice[name] for name in self._end}
        return n_bytes

    def _add_call(self, call: Mapping[str, Any]) -> None:
        """Add a tool call, which comes in two deltas: its name, then its arguments."""
        if "id" in call:
            self._calls.append({name: value for name, value in call.items() if name != "index"})
            return
        function = self._calls[call["index"]]["function"]
        arguments = function["arguments"] + call["function"]["arguments"]
        self._calls[call["index"]]["function"] = {**function, "arguments": arguments}

    def parts(self, *, has_logprobs: bool) -> list[Part]:
        """Return the object."""
        texts = dict(self._texts)
        content = texts.pop("content", None)
        out: list[Part] = [f'{{"index":{self.index},"message":{{"role":"assistant","content":'.encode()]
        if content is not None:
            out += [b'"', content.data, b'"']
        else:
            out += [b"null" if self._calls or texts else b'""']
        out += [b',"refusal":null']
        for name, text in texts.items():
            out += [f',"{name}":"'.encode(), text.data, b'"']
        if self._calls:
            out += [b',"tool_calls":', to_json(self._calls)]
        out += [b'},"logprobs":']
        out += _object({"content": self._logprobs}) if has_logprobs else [b"null"]
        out += [b",", to_json(self._end)[1:-1]]
        return [*out, *list_field("token_ids", self._token_ids), b"}"]


def list_field(name: str, value: JsonList | None) -> list[Part]:
    """Return a further field of an object: a list, or null."""
    return [f',"{name}":'.encode(), *([b"null"] if value is None else [b"[", value.data, b"]"])]


def _object(lists: Mapping[str, JsonList]) -> list[Part]:
    """Return an object of lists."""
    out: list[Part] = []
    for name, made in lists.items():
        out += [f'{"," if out else "{"}"{name}":['.encode(), made.data, b"]"]
    return [*out, b"}"]


def join_parts(choices: list[list[Part]], separator: bytes = b",") -> list[Part]:
    """Return all parts, with a separator between two choices."""
    out: list[Part] = []
    for parts in choices:
        out += [separator, *parts] if out else parts
    return out
