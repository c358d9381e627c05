"""300 random requests of the Responses protocol: openai's own models and accumulator accept every event.

Text, reasoning, tool calls, token limits, errors in the middle, and clients that disconnect.
"""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types import responses as openai_responses
from pydantic import TypeAdapter

from fakes.service import FakeService, Piece, PieceOrError
from llaisys.config import Config
from llaisys.errors import RequestFailedError
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.state import ServerState
from random_chats import Leaver
from sse import named_events

N_REQUESTS = 300
SEED = 23
URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(openai_responses.ResponseStreamEvent)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
WORDS = ("Hi", " there", "\n", "天", "🦙", "<", "tool", '"', "</think>", "<think>", "")


def script_of(draw: random.Random) -> list[PieceOrError]:
    """Return deltas of reasoning, text and calls in any order that a model may write, and an end."""
    tokens = [*(["<think>", "hm", "m", "</think>"] if draw.random() < 0.5 else [])]
    for _ in range(draw.randrange(5)):
        tokens += [CALL] if draw.random() < 0.3 else [draw.choice(WORDS) for _ in range(draw.randrange(4))]
    pieces: list[PieceOrError] = []
    while tokens:
        n = draw.randint(1, 3)
        pieces.append(Piece(tokens[:n]))
        del tokens[:n]
    if draw.random() < 0.15:
        return [*pieces, RequestFailedError("boom")]
    return [*pieces, Piece([draw.choice(WORDS)], draw.choice(("stop", "stop", "length")))]


def body_of(draw: random.Random) -> dict[str, Any]:
    """Return a body with random options."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    options: dict[str, list[Any]] = {
        "input": ["Hi", [], [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]],
        "instructions": ["Be brief.", None],
        "stream": [True, True, False],
        "tools": [[tool], [tool, {"type": "web_search"}], None],
        "parallel_tool_calls": [True, False, None],
        "reasoning": [{"summary": "auto"}, {"effort": "low"}, None],
        "include": [["reasoning.encrypted_content"], ["message.output_text.logprobs"], None],
        "text": [{"format": {"type": "text"}, "verbosity": "low"}, None],
        "max_output_tokens": [5, None],
        "metadata": [{"a": "b"}, None],
        "truncation": ["auto", "disabled", None],
    }
    return {name: draw.choice(values) for name, values in options.items()}


def check_events(events: list[dict[str, Any]], *, is_whole: bool) -> None:
    state = ResponseStreamState[None](input_tools=omit, text_format=omit)
    open_items: set[int] = set()
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        read = EVENT.validate_python(event)
        assert read.type == event["type"]
        state.handle_event(read)
        if event["type"] == "response.output_item.added":
            open_items.add(event["output_index"])
        elif event["type"] == "response.output_item.done":
            open_items.remove(event["output_index"])
        assert len(open_items) <= 1
    assert events[0]["type"] == "response.created"
    if is_whole:
        last = events[-1]
        assert last["type"] in ("response.completed", "response.incomplete", "response.failed")
        assert last["type"] == f"response.{last['response']['status']}"
        if last["type"] != "response.failed":
            done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            assert done == last["response"]["output"]
            assert not open_items
            check_deltas(events, done)


def check_deltas(events: list[dict[str, Any]], items: list[dict[str, Any]]) -> None:
    """The deltas of each item joined are its text."""
    joined = dict.fromkeys((item["id"] for item in items), "")
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] += event["delta"]
    for item in items:
        parts = item.get("content") or item.get("summary") or [{"text": item.get("arguments")}]
        assert joined[item["id"]] == parts[0]["text"]


async def test_random_requests() -> None:
    draw = random.Random(SEED)
    config = Config(reasoning_parser="qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes")
    engine = FakeService(config=config)
    app = create_app(ServerState(config, models=ModelRegistry([engine])), 8000)  # type: ignore[list-item]
    kinds = set()
    for i in range(N_REQUESTS):
        engine.script, body = script_of(draw), body_of(draw)
        leaves = draw.random() < 0.15
        client_app = Leaver(app, draw.randint(0, 6) if leaves else 10**6)
        transport = httpx.ASGITransport(client_app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            try:
                reply = await client.post(URL, json=body)
            except AssertionError:  # httpx: the application ended without a response
                assert leaves
                continue
        where = f"seed {SEED}, request {i}: {json.dumps(body)}, {engine.script}"
        is_failed = isinstance(engine.script[-1], RequestFailedError)
        if body["stream"] and reply.status_code == 200:
            raw = reply.content
            if leaves:
                raw = raw[: raw.rfind(b"\n\n") + 2]
            events = named_events(raw) if raw else []
            if events:
                check_events(events, is_whole=not leaves)
                kinds |= {event["type"] for event in events}
        elif not leaves:
            assert reply.status_code == (500 if is_failed else 200), where
            if not is_failed:
                openai_responses.Response.model_validate(reply.json())
        assert all(call.ended for call in engine.calls), where
        engine.calls.clear()
    assert len(kinds) == 19, sorted(kinds)
