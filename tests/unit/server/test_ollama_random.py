"""300 random requests of Ollama's API: the objects, lines and errors are those of the `ollama` package.

Text, thinking, tool calls, formats, token limits, errors in the middle, and clients that disconnect.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import httpx
from ollama import _types as types

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.output_parts import Content, OutputPart, Reasoning, ToolCall
from llaisys.registry import ModelRegistry
from llaisys.server.app import create_app
from llaisys.server.state import ServerState
from random_chats import Leaver, RandomCompletion

N_REQUESTS = 300
SEED = 2323
ANSWERS: dict[str, type[types.BaseGenerateResponse]] = {
    "/api/chat": types.ChatResponse,
    "/api/generate": types.GenerateResponse,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
INVALID: tuple[dict[str, Any], ...] = (
    {"options": {"num_predict": -3}},
    {"options": {"temperature": "hot"}},
    {"format": "xml"},
    {"think": "very"},
    {"model": "other"},
)


class Case:
    """A random request, and its completion."""

    def __init__(self, draw: random.Random) -> None:
        self.path = draw.choice(["/api/chat", "/api/chat", "/api/generate"])
        self.is_chat = self.path == "/api/chat"
        self.has_tools = self.is_chat and draw.random() < 0.7
        self.has_format = not self.has_tools and draw.random() < 0.5  # which leaves no place for reasoning
        self.completion = RandomCompletion(draw, reasons=not self.has_format, calls=self.has_tools)
        self.leaves = draw.random() < 0.15
        self.n_messages = draw.randint(0, 6) if self.leaves else 10**6
        options: dict[str, list[Any]] = {
            "stream": [True, False, None],
            "think": [True, False, "high", None],
            "options": [{"num_predict": 40, "temperature": 0.5, "num_ctx": 4096}, {"stop": ["END"]}, None],
            "keep_alive": ["5m", 0, None],
            "logprobs": [True, None, None],
        }
        if self.is_chat:
            options["messages"] = [[{"role": "user", "content": "Hi"}]]
            options["tools"] = [[TOOL] if self.has_tools else None]
        else:
            options |= {"prompt": ["Hi"], "system": ["Be brief.", None], "raw": [True, False, None]}
        if self.has_format:
            options["format"] = ["json", SCHEMA]
        self.body = {"model": "tiny:latest"} | {name: draw.choice(each) for name, each in options.items()}
        self.is_invalid = draw.random() < 0.1
        if self.is_invalid:
            self.body |= draw.choice(INVALID)

    @property
    def streams(self) -> bool:
        return self.body["stream"] is not False


def check_object(made: dict[str, Any], case: Case) -> None:
    """Check a whole response, or one line of a stream."""
    answer = ANSWERS[case.path]
    answer.model_validate(made, strict=True)
    assert set(made) <= set(answer.model_fields)
    if case.is_chat:
        assert set(made["message"]) <= set(types.Message.model_fields)
    assert made["model"] == "tiny:latest"
    assert made["done"] == ("eval_count" in made) == ("done_reason" in made)
    if made["done"]:
        end = case.completion.script[-1]
        assert isinstance(end, Piece)
        assert (made["done_reason"], made["prompt_eval_count"]) == (
            end.finish,
            2 if case.body.get("raw") else 3,
        )
        assert made["eval_count"] == len(case.completion.script) - 1
        assert made["total_duration"] >= made["prompt_eval_duration"] + made["eval_duration"] >= 0


def parts_of(made: list[dict[str, Any]]) -> list[OutputPart]:
    """Return the parts of objects in their order; adjacent texts are one."""
    parts: list[OutputPart] = []
    for each in made:
        message = each.get("message", each)
        if message.get("thinking"):
            parts.append(Reasoning(message["thinking"]))
        if text := message.get("content", message.get("response")):
            parts.append(Content(text))
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            parts.append(ToolCall(call["function"]["name"], arguments))
    joined: list[OutputPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content | Reasoning) and isinstance(last, type(part)):
            joined[-1] = type(part)(last.text + part.text)
        else:
            joined.append(part)
    return joined


def by_kind(parts: list[OutputPart]) -> list[OutputPart]:
    """Return the parts as one object has them: the reasoning, the whole text, the calls."""
    order = [Reasoning, Content, ToolCall]
    return sorted(parts, key=lambda part: order.index(type(part)))


def check_stream(raw: bytes, case: Case) -> str:
    """Check the lines of a stream; return what it is."""
    made = [json.loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
    if made and "error" in made[-1]:
        assert case.completion.fails
        assert isinstance(made.pop()["error"], str)
        kind = "broken stream"
    else:
        kind = "cut stream" if case.leaves else "stream"
    for each in made:
        check_object(each, case)
    assert not any(each["done"] for each in made[:-1])
    if kind == "stream":
        assert not case.completion.fails
        assert made[-1]["done"]
        assert parts_of(made) == case.completion.parts
    return kind


async def test_random_requests() -> None:
    config = Config(reasoning_parser="qwen3", tool_call_parser="hermes")
    engine = FakeService(config=config)
    app = create_app(ServerState(config, models=ModelRegistry([engine])), 8000)  # type: ignore[list-item]
    draw, seen = random.Random(SEED), Counter[str]()
    for i in range(N_REQUESTS):
        case = Case(draw)
        engine.script = case.completion.script
        print(f"seed {SEED}, request {i}: {case.path} {json.dumps(case.body)}, {engine.script}")
        transport = httpx.ASGITransport(Leaver(app, case.n_messages), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            try:
                reply = await client.post(case.path, json=case.body)
            except AssertionError:  # httpx: the application ended without a response
                assert case.leaves
                continue
        if reply.status_code != 200:
            assert case.is_invalid or case.leaves or case.completion.fails
            assert isinstance(reply.json()["error"], str)
            kind = "error"
        elif case.streams:
            kind = check_stream(reply.content, case)
        elif reply.content and not case.leaves:
            kind = "object"
            check_object(reply.json(), case)
            assert by_kind(parts_of([reply.json()])) == by_kind(whole_parts(case))
        else:
            kind = "cut object"
        seen[kind] += 1
        assert all(call.ended for call in engine.calls)
        engine.calls.clear()
    assert min(seen[kind] for kind in ("object", "stream", "broken stream", "error", "cut stream")) > 5, seen


def whole_parts(case: Case) -> list[OutputPart]:
    """Return the parts of the completion with all texts joined, as an object has them."""
    text = "".join(part.text for part in case.completion.parts if isinstance(part, Content))
    others = [part for part in case.completion.parts if not isinstance(part, Content)]
    return [*others, Content(text)] if text else others
