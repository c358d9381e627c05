"""300 random requests of Messages: the objects, events and errors are those of the `anthropic` package.

The package's client reads responses without validation, so the test validates with its pydantic models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import httpx
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.beta_error_response import BetaErrorResponse
from pydantic import TypeAdapter
from starlette.types import ASGIApp

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.output_parts import Content, Reasoning, ToolCall
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.state import ServerState
from random_chats import RandomCompletion
from sse import named_events

N_REQUESTS = 300
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
ERRORS: TypeAdapter[Any] = TypeAdapter(BetaErrorResponse)
DELTAS = {"text": {"text_delta"}, "tool_use": {"input_json_delta"}}
DELTAS["thinking"] = {"thinking_delta", "signature_delta"}
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


class Case:
    """A random request, and its completion."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.completion = RandomCompletion(self._draw)
        self.body = self._body()
        self.is_rejected = self._draw.random() < 0.15
        if self.is_rejected:
            self.body |= self._draw.choice(
                [{"messages": []}, {"max_tokens": -1}, {"tools": [{}]}, {"system": 1}, {"thinking": {}}]
            )

    def _body(self) -> dict[str, Any]:
        draw = self._draw
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": draw.choice([1, 40, 10_000]),
            "messages": [{"role": "user", "content": draw.choice(["Hi", [{"type": "text", "text": "Hi"}]])}],
            "tools": [TOOL],
            "stream": draw.random() < 0.7,
        }
        more: Mapping[str, Any] = {
            "system": "S",
            "temperature": 0.5,
            "stop_sequences": ["END"],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        }
        return body | {name: value for name, value in more.items() if draw.random() < 0.3}


def check_events(found: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Check the order of events and the type of each; return the message that the client makes of them."""
    snapshot: Any = None
    kinds: list[str] = []
    open_block = False
    buffers: dict[int, bytes] = {}
    for event in found:
        if event["type"] == "error":
            ERRORS.validate_python({"request_id": None, **event})
            assert event is found[-1]
            assert case.completion.fails
            return {}
        parsed = EVENTS.validate_python(event)
        match event["type"]:
            case "content_block_start":
                assert not open_block
                assert event["index"] == len(kinds)
                kinds.append(event["content_block"]["type"])
                open_block = True
            case "content_block_delta":
                assert open_block
                assert event["index"] == len(kinds) - 1
                assert event["delta"]["type"] in DELTAS[kinds[-1]]
            case "content_block_stop":
                assert open_block
                assert event["index"] == len(kinds) - 1
                open_block = False
            case kind:
                assert not open_block, kind
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert not case.completion.fails
    made: dict[str, Any] = snapshot.to_dict()
    return made


def check_message(message: dict[str, Any], case: Case) -> None:
    """Check the fields of a message, and that its blocks are the parts of the completion."""
    Message.model_validate(message, strict=True)
    assert set(message) <= set(Message.model_fields)
    blocks = []
    for block in message["content"]:
        match block["type"]:
            case "text":
                blocks.append(Content(block["text"]))
            case "thinking":
                assert block["signature"] == ""
                blocks.append(Reasoning(block["thinking"]))
            case "tool_use":
                blocks.append(ToolCall(block["name"], json.dumps(block["input"], ensure_ascii=False)))
    wanted = [
        ToolCall(part.name, json.dumps(json.loads(part.arguments), ensure_ascii=False))
        if isinstance(part, ToolCall)
        else part
        for part in case.completion.parts
    ]
    assert blocks == wanted
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 3
    assert usage["output_tokens"] == len(case.completion.script) - 1


async def test_every_response_is_one_of_the_client() -> None:
    engine = FakeService(config=Config(reasoning_parser="qwen3", tool_call_parser="hermes"))
    engine.config = Config(reasoning_parser="qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes")
    app: ASGIApp = create_app(ServerState(Config(), models=ModelRegistry([engine])), 8000)  # type: ignore[list-item]
    seen: dict[str, int] = {}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
    ) as client:
        for seed in range(N_REQUESTS):
            case = Case(seed)
            engine.script = case.completion.script
            response = await client.post("/v1/messages", json=case.body)
            kind = "error"
            if response.status_code != 200:
                assert case.is_rejected or case.completion.fails, (seed, response.text)
                ERRORS.validate_python({"request_id": None, **response.json()})
            elif case.body["stream"]:
                message = check_events(named_events(response.content), case)
                kind = "stream" if message else "broken stream"
                if message:
                    check_message(message, case)
            else:
                kind = "message"
                check_message(response.json(), case)
            seen[kind] = seen.get(kind, 0) + 1
            if not case.is_rejected:
                counted = {name: case.body[name] for name in ("model", "messages", "tools")}
                count = await client.post("/v1/messages/count_tokens", json=counted)
                MessageTokensCount.model_validate(count.json(), strict=True)
    assert min(seen[kind] for kind in ("message", "stream", "broken stream", "error")) > 20, seen
    assert all(call.ended for call in engine.calls)
