"""Reads tools and structured outputs of a request, and parses the text of a choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llaisys.async_llm import AsyncLLM
from llaisys.errors import LlaisysError, RejectedError, UnsupportedError
from llaisys.output_parts import CompletionOutputParser, Content, OutputPart, ReasoningState, ToolCall
from llaisys.sampling_params import SamplingParams, StructuredOutputsParams
from llaisys.server.request_schemas import ChatCompletionRequest, GenerationRequest
from llaisys.server.response_body import Json

# vLLM's older field names -> the fields of `structured_outputs` that replaced them.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# OpenAI allows 64 characters, Anthropic 128.
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_STRUCTURED = frozenset({"json", "regex", "choice", "grammar", "json_object"})


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """A grammar, and the field of the request that specified it."""

    spec: StructuredOutputsParams
    field: str


def grammar_of(body: GenerationRequest) -> GrammarRequest | None:
    """Return the request's grammar, if any. Raises RejectedError or UnsupportedError naming the field.

    The fields are OpenAI's `response_format` and vLLM's fields; a request may set only one of them.
    """
    requests = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *(
            _grammar_request({field: value}, name)
            for name, field in GUIDED.items()
            if (value := getattr(body, name)) is not None
        ),
    ]
    if len(requests) > 1:
        raise RejectedError(
            f"{requests[0].field} and {requests[1].field} exclude each other", param=requests[1].field
        )
    return requests[0] if requests else None


async def with_compiled_grammar(
    engine: AsyncLLM, params: SamplingParams, grammar_request: GrammarRequest | None, client_id: str
) -> SamplingParams:
    """Return the parameters with the grammar, after compiling it. Raises RejectedError naming the field."""
    if grammar_request is None:
        return params
    try:
        await engine.compile_grammar(grammar_request.spec, client_id)
        return params.with_grammar(grammar_request.spec)
    except LlaisysError as e:
        raise with_param(e, grammar_request.field) from e


def _of_response_format(format: Mapping[str, Any] | None) -> list[GrammarRequest]:
    if format is None:
        return []
    match format.get("type"):
        case "text":
            return []
        case "json_object":
            return [_grammar_request({"json_object": True}, "response_format")]
        case "json_schema":
            return [_of_json_schema(format.get("json_schema"))]
        case kind:
            raise UnsupportedError(
                f"response_format.type is {str(kind)[:40]!r}, supported: text, json_object, json_schema",
                param="response_format.type",
            )


def _of_json_schema(given: Any) -> GrammarRequest:
    """Read `{"name", "schema", "strict", "description"}`. The schema is enforced even without `strict`."""
    where = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise RejectedError(f"{where} is missing", param=where)
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise RejectedError(f"{where}.schema must be an object", param=f"{where}.schema")
    return _grammar_request({"json": schema}, f"{where}.schema")


def _of_structured_outputs(given: Mapping[str, Any] | None) -> list[GrammarRequest]:
    if given is None:
        return []
    for name, value in given.items():
        if name not in _STRUCTURED and value not in (None, False):
            where = f"structured_outputs.{name[:40]}"
            raise UnsupportedError(f"{where} is not supported by this server; leave it out", param=where)
    return [
        _grammar_request(
            {name: value for name, value in given.items() if name in _STRUCTURED}, "structured_outputs"
        )
    ]


def _grammar_request(values: Mapping[str, Any], field: str) -> GrammarRequest:
    try:
        return GrammarRequest(StructuredOutputsParams(**values), field)
    except RejectedError as e:
        raise with_param(e, field) from e


def with_param(error: LlaisysError, field: str) -> LlaisysError:
    """Return the same error with the field of the request in place of `structured_outputs`."""
    param = error.param or ""
    if not param.startswith("structured_outputs") or field == "structured_outputs":
        return error
    return type(error)(str(error).replace(param, field, 1), param=field)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    - `shown`: the tools for the chat template; None without tools.
    - `schemas`: functions whose calls are parsed from the output, with the JSON schemas of their arguments.
      Empty: no calls are parsed.
    - `grammar`: the grammar of the output, for tool calls or as requested.
    - `only_first`: drop all tool calls except the first (`parallel_tool_calls: false`).
    """

    shown: list[Json] | None
    schemas: Mapping[str, Json]
    grammar: GrammarRequest | None
    only_first: bool


def tool_use(body: ChatCompletionRequest, engine: AsyncLLM) -> ToolUse:
    """Check `tools` and `tool_choice`. Raises RejectedError or UnsupportedError naming the field."""
    grammar_request = grammar_of(body)
    only_first = body.parallel_tool_calls is False
    schemas = _schemas(body.tools or [])
    mode, wanted = _choice(body.tool_choice, schemas)
    if mode == "none":  # without tools in the prompt, a model calls none
        return ToolUse(None, {}, grammar_request, only_first)
    if mode == "auto":
        if engine.output_formats.tool is None:
            raise UnsupportedError(
                "the model's chat template shows no known format of tool calls, so tool_choice auto needs a "
                "server with --tool-call-parser; send none, required or the name of a function",
                param="tool_choice",
            )
        return ToolUse(body.tools, schemas if grammar_request is None else {}, grammar_request, only_first)
    if grammar_request is not None:
        raise RejectedError(
            f"tool_choice and {grammar_request.field} exclude each other", param="tool_choice"
        )
    try:
        spec = engine.output_formats.tool_grammar(wanted, parallel=mode == "required" and not only_first)
    except RejectedError as e:
        raise with_param(e, "tools") from e
    grammar = GrammarRequest(spec, "tools")
    return ToolUse(body.tools, wanted, grammar, only_first)


def checked_tools(tools: list[Json] | None) -> list[Json] | None:
    """Return the checked tools for the chat template; None without tools."""
    return tools if _schemas(tools or []) else None


def _schemas(tools: list[Json]) -> dict[str, Json]:
    """Return function name -> JSON schema of the arguments, in the order of the request."""
    schemas: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise UnsupportedError(f"{where} is not of type 'function', the only one supported", param=where)
        name = function.get("name")
        if not isinstance(name, str) or _FUNCTION_NAME.fullmatch(name) is None or name in schemas:
            raise RejectedError(
                f"{where}.function.name must be unique, 1 to 128 letters, digits, _ or -",
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
    """Return the mode of tool_choice, and the functions that may be called."""
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
        raise RejectedError(
            f"tool_choice names {str(name)[:40]!r}, which is not in tools", param="tool_choice"
        )
    return "named", {name: schemas[name]}


class ChoiceParser:
    """Divides the text of one choice into content, reasoning and tool calls.

    `parser`: None if the output has no such parts; all text is content then. `only_first`: drop all calls
    except the first.
    """

    def __init__(self, parser: CompletionOutputParser | None, *, only_first: bool = False) -> None:
        self._parser = parser
        self._only_first = only_first
        self._n_calls = 0

    @property
    def reasoning_state(self) -> ReasoningState:
        """Return whether the text after what was pushed is reasoning."""
        return "over" if self._parser is None else self._parser.reasoning_state

    def push(self, text: str, finish_reason: str | None) -> list[OutputPart]:
        """Return the parts that are final after the next piece of text. `finish_reason`: set for the last
        piece."""
        if self._parser is None:
            return [Content(text)] if text else []
        parts = self._parser.push(text)
        if finish_reason is not None:
            parts += self._parser.finish(cut=finish_reason == "length")
        return [part for part in parts if not isinstance(part, ToolCall) or self._is_kept()]

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason: `tool_calls` if a complete output has tool calls."""
        return "tool_calls" if self._n_calls and reason == "stop" else reason

    def _is_kept(self) -> bool:
        """Count a call; return whether it is part of the response."""
        self._n_calls += 1
        return not (self._only_first and self._n_calls > 1)
