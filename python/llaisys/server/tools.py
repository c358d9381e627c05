"""Tools of a chat request, and the parts of its answers in OpenAI's shape."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.bodies import ChatCompletionRequest
from llaisys.server.response_format import Asked, grammar_of, named
from llaisys.service import AsyncLLM
from llaisys.types import Content, Part, PartParser, Reasoning

Json: TypeAlias = dict[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools ask for.

    - `shown`: the tools for the template, None without any.
    - `names`: calls of these are found in the answer; empty: none is looked for.
    - `grammar`: what the answer must look like, calls or something else.
    - `only_first`: calls after the first are left out (`parallel_tool_calls: false`).
    """

    shown: list[Json] | None
    names: frozenset[str]
    grammar: Asked | None
    only_first: bool


def tool_use(body: ChatCompletionRequest, engine: AsyncLLM) -> ToolUse:
    """Checks `tools` and `tool_choice`. Raises RejectedError or UnsupportedError naming the field."""
    asked = grammar_of(body)
    only_first = body.parallel_tool_calls is False
    schemas = _schemas(body.tools or [])
    mode, wanted = _choice(body.tool_choice, schemas)
    if mode == "none":  # a model that sees no tools calls none
        return ToolUse(None, frozenset(), asked, only_first)
    if mode == "auto":
        config = engine.config
        if not config.enable_auto_tool_choice or config.tool_call_parser is None:
            raise UnsupportedError(
                "tool_choice auto needs a server with --enable-auto-tool-choice and --tool-call-parser; "
                "send none, required or the name of a function",
                param="tool_choice",
            )
        return ToolUse(body.tools, frozenset(schemas) if asked is None else frozenset(), asked, only_first)
    if asked is not None:
        raise RejectedError(f"tool_choice and {asked.field} exclude each other", param="tool_choice")
    try:
        spec = engine.tool_grammar(wanted, parallel=mode == "required" and not only_first)
    except RejectedError as e:
        raise named(e, "tools") from e
    grammar = Asked(spec, "tools")
    return ToolUse(body.tools, frozenset(wanted), grammar, only_first)


def shown_tools(tools: list[Json] | None) -> list[Json] | None:
    """The tools for the template, checked; None without any."""
    return tools if _schemas(tools or []) else None


def _schemas(tools: list[Json]) -> dict[str, Json]:
    """Name -> JSON schema of the arguments, in the order of the request."""
    schemas: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise UnsupportedError(f"{where} is not of type 'function', the only one supported", param=where)
        name = function.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None or name in schemas:
            raise RejectedError(
                f"{where}.function.name must be of its own, 1 to 64 letters, digits, _ or -",
                param=f"{where}.function.name",
            )
        schema = function.get("parameters")
        schema = {"properties": {}, "additionalProperties": False} if schema is None else schema
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            where += ".function.parameters"
            raise RejectedError(f"{where} must be the JSON schema of an object", param=where)
        schemas[name] = dict(schema)
    return schemas


def _choice(
    choice: str | Json | None, schemas: Mapping[str, Json]
) -> tuple[Literal["none", "auto", "required", "named"], Mapping[str, Json]]:
    """How the model is to choose, and among which functions."""
    if choice is None:
        choice = "auto" if schemas else "none"
    if isinstance(choice, str):
        if choice == "required" and schemas:
            return "required", schemas
        if choice in ("none", "auto"):
            return ("auto", schemas) if choice == "auto" and schemas else ("none", {})
        if choice != "required":
            raise RejectedError(
                f"tool_choice is {choice[:40]!r}, allowed are none, auto, required and "
                "{type: function, function: {name}}",
                param="tool_choice",
            )
        raise RejectedError("tool_choice required needs tools", param="tool_choice")
    if choice.get("type") != "function":
        raise UnsupportedError(
            f"tool_choice.type is {str(choice.get('type'))[:40]!r}, supported is function",
            param="tool_choice",
        )
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in schemas:
        raise RejectedError("tool_choice names a function that is not in tools", param="tool_choice")
    return "named", {name: schemas[name]}


class AnswerParts:
    """The deltas of one choice: its text, or what a parser makes of it."""

    def __init__(self, parser: PartParser | None, *, only_first: bool = False) -> None:
        self._parser = parser
        self._only_first = only_first
        self._n_calls = 0

    def deltas(self, text: str, finish_reason: str | None) -> list[Json]:
        """The `delta` of each chunk that the next piece of text gives. `finish_reason`: of the last piece."""
        if self._parser is None:
            return [{"content": text}] if text else []
        parts = self._parser.push(text)
        if finish_reason is not None:
            parts += self._parser.finish(cut=finish_reason == "length")
        return [delta for part in parts for delta in self._of_part(part)]

    def finish_reason(self, reason: str) -> str:
        """`tool_calls` where a whole answer has some."""
        return "tool_calls" if self._n_calls and reason == "stop" else reason

    def _of_part(self, part: Part) -> list[Json]:
        match part:
            case Content(text):
                return [{"content": text}]
            case Reasoning(text):
                return [{"reasoning": text, "reasoning_content": text}]
        if self._only_first and self._n_calls:
            return []
        index = self._n_calls
        self._n_calls += 1
        begin = {
            "index": index,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }
        more = {"index": index, "function": {"arguments": part.arguments}}
        return [{"tool_calls": [begin]}, {"tool_calls": [more]}]
