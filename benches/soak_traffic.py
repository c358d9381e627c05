"""The actions of clients in a soak test: valid requests, invalid ones, and disconnects.

Each action is a coroutine that raises AssertionError for an unexpected response. Random values are from the
visitor's seeded generator. Words and grammars are from fixed sets, which the server's bounded caches contain
after the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from llaisys.bench.workload import WORDS

N_GRAMMARS = 300  # more than the server keeps
BUSY = (200, 408, 429)  # 408: the server has a short request timeout


@dataclass(frozen=True, slots=True)
class Visitor:
    """One client: its connections, its random generator and its name."""

    session: aiohttp.ClientSession
    rng: random.Random
    url: str
    name: str

    def words(self, most: int) -> str:
        """Return up to `most` words."""
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, most)))

    async def post(self, path: str, expected: tuple[int, ...], body: Any) -> dict[str, Any]:
        """Send a body; return the JSON of the response."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        async with self.session.post(self.url + path, data=raw, headers=headers) as response:
            text = await response.read()
            assert response.status in expected, f"{path}: {response.status} {text[:200]!r}"
            found: dict[str, Any] = json.loads(text)
            return found

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        """Return the body of a chat of one or two messages."""
        messages = [{"role": "user", "content": self.words(40)}]
        if self.rng.random() < 0.3:
            messages = [{"role": "system", "content": self.words(8)}, *messages]
        return {"messages": messages, "max_tokens": self.rng.randint(1, 24), **fields}


Action: TypeAlias = "Callable[[Visitor], Awaitable[None]]"


async def chat(visitor: Visitor) -> None:
    """Request a chat completion without a stream."""
    await visitor.post("/v1/chat/completions", BUSY, visitor.chat_body())


async def completion(visitor: Visitor) -> None:
    """Request several choices with logprobs and stop strings."""
    body = {"prompt": visitor.words(30), "max_tokens": 12, "n": 2, "logprobs": 2, "stop": ["the", "\n"]}
    await visitor.post("/v1/completions", BUSY, {**body, "seed": visitor.rng.randint(0, 9)})


async def stream(visitor: Visitor) -> None:
    """Read a stream to its terminator, sometimes slowly."""
    pause_s = 0.05 if visitor.rng.random() < 0.2 else 0.0
    body = visitor.chat_body(stream=True, stream_options={"include_usage": True})
    async with visitor.session.post(f"{visitor.url}/v1/chat/completions", json=body) as response:
        assert response.status in BUSY, response.status
        n_done = 0
        async for line in response.content:
            n_done += line.startswith(b"data: [DONE]")
            await asyncio.sleep(pause_s)
        assert n_done == (response.status == 200), f"{n_done} terminators"


async def leave(visitor: Visitor) -> None:
    """Disconnect after some chunks, or before any."""
    body = visitor.chat_body(stream=visitor.rng.random() < 0.7, ignore_eos=True)
    body["max_tokens"] = 400
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_read_some(visitor, body), visitor.rng.random())


async def _read_some(visitor: Visitor, body: dict[str, Any]) -> None:
    async with visitor.session.post(f"{visitor.url}/v1/chat/completions", json=body) as response:
        assert response.status in BUSY, response.status
        async for _ in response.content:
            if visitor.rng.random() < 0.1:
                response.close()
                return


async def take_too_long(visitor: Visitor) -> None:
    """Request a completion that exceeds the server's request timeout."""
    await visitor.post("/v1/chat/completions", BUSY, visitor.chat_body(max_tokens=3000, ignore_eos=True))


async def burst(visitor: Visitor) -> None:
    """Send more requests at once than may run and wait, so that some are rejected."""
    await asyncio.gather(*(chat(visitor) for _ in range(30)))


async def half_a_request(visitor: Visitor) -> None:
    """Send a head without its body, or a part of a head, and disconnect."""
    parts = urlsplit(visitor.url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f'POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: 1000\r\n\r\n{{"prompt":'
    writer.write(head[: visitor.rng.randint(1, len(head))].encode())
    await writer.drain()
    await asyncio.sleep(visitor.rng.random() * 0.1)
    writer.close()


async def bad(visitor: Visitor) -> None:
    """Send an invalid request. While the queue is full it gets 429, unless it is too large."""
    path, status, body = visitor.rng.choice(
        [
            ("/v1/chat/completions", 400, b"{not json"),
            ("/v1/chat/completions", 400, b"[" * 100_000),
            ("/v1/chat/completions", 400, {"messages": "hello"}),
            ("/v1/chat/completions", 400, {"messages": [{"role": "nobody", "content": "x"}]}),
            ("/v1/completions", 400, {"prompt": "x", "temperature": -1}),
            ("/v1/completions", 400, {"prompt": "x", "max_tokens": 0}),
            ("/v1/completions", 400, {"prompt": [10**9]}),
            ("/v1/completions", 400, {"prompt": "word " * 20_000}),
            ("/v1/completions", 400, {"prompt": "x", "structured_outputs": {"regex": "("}}),
            ("/v1/completions", 404, {"prompt": "x", "model": "nobody"}),
            ("/v1/completions", 413, b"x" * 5_000_000),
            ("/v1/nothing", 404, {}),
        ]
    )
    try:
        response = await visitor.post(path, (status,) if status == 413 else (status, 429), body)
        assert response["error"]["message"]
    except aiohttp.ClientOSError:
        assert status == 413  # the server closed the connection during the upload


async def structured(visitor: Visitor) -> None:
    """Request a completion with one of N_GRAMMARS grammars."""
    i = visitor.rng.randrange(N_GRAMMARS)
    await visitor.post("/v1/chat/completions", BUSY, {**visitor.chat_body(), **grammar(i)})


def grammar(i: int) -> dict[str, Any]:
    """Return the request fields of grammar `i`."""
    if i % 2:
        return {"structured_outputs": {"regex": f"[a-z]{{1,{1 + i}}}"}}
    schema = {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


async def tool(visitor: Visitor) -> None:
    """Require a tool call."""
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    await visitor.post("/v1/chat/completions", BUSY, visitor.chat_body(tools=tools, tool_choice="required"))


async def look(visitor: Visitor) -> None:
    """Read the paths of dashboards and probes."""
    path = visitor.rng.choice(["/livez", "/health", "/ready", "/metrics", "/v1/models", "/version", "/"])
    async with visitor.session.get(visitor.url + path) as response:
        assert response.status == 200, f"{path}: {response.status}"
        await response.read()


async def embed(visitor: Visitor) -> None:
    """Request embeddings of several texts."""
    body = {"input": [visitor.words(20) for _ in range(3)], "encoding_format": "base64"}
    await visitor.post("/v1/embeddings", BUSY, body)


async def tokenize(visitor: Visitor) -> None:
    """Tokenize a text and detokenize the ids."""
    ids = (await visitor.post("/tokenize", (200,), {"prompt": visitor.words(50)}))["tokens"]
    await visitor.post("/detokenize", (200,), {"tokens": ids})


async def converse(visitor: Visitor) -> None:
    """Run two turns of a named session, then delete it."""
    name = f"s-{visitor.name}"
    messages = [{"role": "user", "content": visitor.words(10)}]
    for _ in range(2):
        body = {"messages": messages, "max_tokens": 4, "session_id": name}
        response = await visitor.post("/v1/chat/completions", BUSY, body)
        if "error" in response:
            break
        messages += [response["choices"][0]["message"], {"role": "user", "content": visitor.words(10)}]
    async with visitor.session.delete(f"{visitor.url}/v1/sessions/{name}") as deleted:
        assert deleted.status in (200, 404), deleted.status


# (action, weight, the route that it needs)
ACTIONS: tuple[tuple[Action, int, str], ...] = (
    (chat, 8, ""),
    (completion, 6, ""),
    (stream, 12, ""),
    (leave, 10, ""),
    (burst, 1, ""),
    (take_too_long, 1, ""),
    (half_a_request, 4, ""),
    (bad, 10, ""),
    (structured, 4, ""),
    (tool, 2, ""),
    (look, 6, ""),
    (embed, 2, "/v1/embeddings"),
    (tokenize, 2, "/tokenize"),
    (converse, 4, "/v1/sessions"),
)


async def available(visitor: Visitor) -> list[tuple[Action, int]]:
    """Return the actions whose route the server has."""
    found = []
    for action, weight, route in ACTIONS:
        if route:
            async with visitor.session.post(visitor.url + route, json={}) as response:
                if response.status in (404, 405):
                    continue
        found.append((action, weight))
    return found
