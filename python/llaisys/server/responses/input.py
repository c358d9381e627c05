"""Translates a Responses request to a chat request: input items to messages, and each field to chat's."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.chat import EFFORTS, effort_kwargs
from llaisys.server.protocol import field_names, text_of
from llaisys.server.request_schemas import MESSAGES_MAX, ChatCompletionRequest
from llaisys.server.response_body import Json
from llaisys.server.responses.schemas import ResponsesRequest

# Known fields that are not supported -> the values without effect.
RESPONSES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
}
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
TRUNCATIONS = ("disabled", "auto")
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference")

# Fields with the same name and meaning in a chat request.
_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "add_generation_prompt",
    "continue_final_message",
    "parallel_tool_calls",
    "priority",
    "cache_salt",
    "request_id",
    "session_id",
)

# An input item, and its name in errors.
NamedItem: TypeAlias = tuple[str, Json]


@dataclass(frozen=True, slots=True)
class Translation:
    """A Responses request as a chat request.

    - `chat`: the chat request. `truncates`: drop its oldest turns if it is too long.
    - `tools`: the tools that the model can call, in the format of Responses.
    - `ignored`: names of what the server skips. `names`: field of the chat request -> field of the body.
    - `text`, `reasoning`: these fields as the response repeats them.
    """

    chat: ChatCompletionRequest
    truncates: bool
    tools: list[Json]
    ignored: list[str]
    names: Mapping[str, str]
    text: Json
    reasoning: Json

    @contextmanager
    def field_names(self) -> Iterator[None]:
        """Rename the fields in errors that are raised in this context."""
        with field_names(self.names):
            yield


def input_items(body: ResponsesRequest) -> list[Json]:
    """Return the items of `input`. A text is one user message; so is the input of a probe, which is empty."""
    if isinstance(body.input, list) and (body.input or body.previous_response_id):
        return body.input
    if not body.input and (body.instructions or body.previous_response_id):
        return []
    return [{"type": "message", "role": "user", "content": body.input or ""}]


def translate(body: ResponsesRequest, items: Sequence[NamedItem]) -> Translation:
    """Translate a body with these input items.

    Raises RejectedError or UnsupportedError naming a field of the body.
    """
    if len(items) > MESSAGES_MAX:
        raise RejectedError(
            f"the input has {len(items)} items with those of the previous responses, at most {MESSAGES_MAX}",
            param="previous_response_id" if body.previous_response_id else "input",
        )
    tools = _Tools.of(body)
    text = _text_config(body.text)
    reasoning = _reasoning_config(body.reasoning)
    include = set(body.include or ())
    has_logprobs = LOGPROBS in include or bool(body.top_logprobs)
    chat = ChatCompletionRequest.model_construct(
        **{name: getattr(body, name) for name in _SAME},
        messages=_messages(items, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        response_format=_response_format(text["format"]),
        chat_template_kwargs=_template_kwargs(body.chat_template_kwargs, reasoning["effort"]),
        tools=tools.for_chat() or None,
        tool_choice=tools.choice,
    )
    names = {
        "messages": "input",
        "prompt": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        **tools.names(),
    }
    ignored = [f"tools.{kind}" for kind in tools.skipped]
    ignored += ["text.verbosity"] if text.get("verbosity", "medium") != "medium" else []
    truncation = _one_of("truncation", body.truncation or "disabled", TRUNCATIONS)
    return Translation(chat, truncation == "auto", tools.used, ignored, names, text, reasoning)


def _one_of(param: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise RejectedError(f"{param} is {str(value)[:40]!r}, allowed are {', '.join(allowed)}", param=param)
    return str(value)


def _reasoning_config(given: Json | None) -> Json:
    """Return `{"effort", "summary"}`, null if absent."""
    given = given or {}
    effort = given.get("effort")
    summary = given.get("summary") or given.get("generate_summary")
    return {
        "effort": None if effort is None else _one_of("reasoning.effort", effort, EFFORTS),
        "summary": None if summary is None else _one_of("reasoning.summary", summary, SUMMARIES),
    }


def _template_kwargs(given: Json | None, effort: str | None) -> Json:
    """Return the template's variables: those of the effort, then the given ones."""
    return {**effort_kwargs(effort), **(given or {})}


def _text_config(given: Json | None) -> Json:
    """Return `{"format", "verbosity"}`."""
    given = given or {}
    format = {"type": "text"} if given.get("format") is None else given["format"]
    if not isinstance(format, Mapping):
        raise RejectedError("text.format must be an object", param="text.format")
    verbosity = given.get("verbosity")
    made: Json = {"format": dict(format)}
    if verbosity is not None:
        made["verbosity"] = _one_of("text.verbosity", verbosity, VERBOSITIES)
    return made


def _response_format(format: Json) -> Json | None:
    """Return chat's form of `text.format`, in which the fields of a schema are one level deeper."""
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {k: v for k, v in format.items() if k != "type"}}


@dataclass(slots=True)
class _Tools:
    """The tools of a request. `used`: those that the model can call, with their indexes in the body.

    `skipped`: types that the server cannot run. `choice`: chat's `tool_choice`.
    """

    used: list[Json] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    skipped: dict[str, None] = field(default_factory=dict)
    choice: str | Json | None = None

    @staticmethod
    def of(body: ResponsesRequest) -> _Tools:
        made = _Tools()
        allowed: set[Any] | None = None
        made.choice = body.tool_choice
        if isinstance(body.tool_choice, dict):
            made.choice, allowed = _tool_choice(body.tool_choice)
        for i, tool in enumerate(body.tools or ()):
            kind = tool.get("type")
            if kind != "function":
                name = "".join(c for c in str(kind)[:40] if c.isascii() and (c.isalnum() or c in "_-"))
                made.skipped[name or "unknown"] = None
            elif allowed is None or tool.get("name") in allowed:
                fields = ("type", "name", "description", "parameters", "strict")
                made.used.append({name: tool.get(name) for name in fields})
                made.indexes.append(i)
        return made

    def for_chat(self) -> list[Json]:
        """Return the tools in the format of chat completions."""
        return [
            {
                "type": "function",
                "function": {k: v for k, v in tool.items() if k != "type" and v is not None},
            }
            for tool in self.used
        ]

    def names(self) -> dict[str, str]:
        """Return the names of the fields of tools: a function's fields are one level deeper in chat."""
        pairs = list(enumerate(self.indexes))
        functions = {f"tools[{k}].function": f"tools[{i}]" for k, i in pairs}
        return functions | {f"tools[{k}]": f"tools[{i}]" for k, i in pairs}


def _tool_choice(choice: Json) -> tuple[str | Json, set[Any] | None]:
    """Return chat's `tool_choice`, and the names of the allowed tools; None: all."""
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}, None
        case "allowed_tools":
            tools = choice.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise RejectedError("tool_choice.tools must be a list of tools", param="tool_choice.tools")
            mode = _one_of("tool_choice.mode", choice.get("mode"), ("auto", "required"))
            return mode, {str(tool.get("name")) for tool in tools}
        case kind:
            raise UnsupportedError(
                f"tool_choice.type is {str(kind)[:40]!r}, supported are function and allowed_tools",
                param="tool_choice.type",
            )


def _messages(items: Iterable[NamedItem], instructions: str | None) -> list[Json]:
    """Return the messages of a conversation. `instructions` and all system messages become its first one.

    Many templates allow one system message, at the beginning only.
    """
    made = _Messages()
    for where, item in items:
        made.add(where, item)
    system = [text_of("instructions", instructions)] if instructions else []
    system += [text for text in made.system if text]
    return [{"role": "system", "content": "\n\n".join(system)}] * bool(system) + made.messages


class _Messages:
    """The messages of a growing conversation. Adjacent reasoning, text and calls are one message."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.messages: list[Json] = []
        self._names: dict[str, str] = {}  # of called functions, by call id

    def add(self, where: str, item: Json) -> None:
        """Add an item. Raises RejectedError or UnsupportedError naming a part of `where`."""
        match item.get("type", "message"):
            case "message":
                self._add_message(where, item)
            case "reasoning":
                text = _reasoning_text(where, item)
                if text:
                    self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case "function_call":
                self._add_call(where, item)
            case "function_call_output":
                call_id = _string(where, item, "call_id")
                text = _text(f"{where}.output", item.get("output"))
                message = {"role": "tool", "tool_call_id": call_id, "content": text}
                if call_id in self._names:
                    message["name"] = self._names[call_id]
                self.messages.append(message)
            case kind:
                raise UnsupportedError(
                    f"{where}.type is {str(kind)[:40]!r}, supported are {', '.join(ITEM_TYPES)}",
                    param=f"{where}.type",
                )

    def _add_message(self, where: str, item: Json) -> None:
        role = _one_of(f"{where}.role", item.get("role"), ROLES)
        text = _text(f"{where}.content", item.get("content"))
        if role in ("system", "developer"):
            self.system.append(text)
        elif role == "user":
            self.messages.append({"role": "user", "content": text})
        else:
            self._assistant("content")["content"] = text

    def _add_call(self, where: str, item: Json) -> None:
        call_id, name = _string(where, item, "call_id"), _string(where, item, "name")
        self._names[call_id] = name
        function = {"name": name, "arguments": _arguments(where, item)}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self, *excluded: str) -> Json:
        """Return the last message if it is the assistant's and has none of these fields, or a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in excluded):
            # Not null: templates that know no tool calls join the content of every message.
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _string(where: str, item: Json, name: str) -> str:
    return text_of(f"{where}.{name}", item.get(name))


def _arguments(where: str, item: Json) -> str:
    """Return the arguments of a call: the text of a JSON object, or an empty text."""
    text = _string(where, item, "arguments")
    try:
        given = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        name = f"{where}.arguments"
        raise RejectedError(f"{name} must be the text of a JSON object", param=name)
    return text


def _text(where: str, content: Any) -> str:
    """Return the text of a message or of a function's output: a string, or a list of parts with text.

    Parts are joined by a newline, as in chat messages.
    """
    if not isinstance(content, list):
        return text_of(where, content)
    return "\n".join(_part_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in TEXT_PARTS:
        raise UnsupportedError(
            f"{where} is of type {str(kind)[:40]!r}; supported are {', '.join(TEXT_PARTS)}", param=where
        )
    return _string(where, part, TEXT_PARTS[kind])


def encrypted(reasoning: str) -> str:
    """Return the `encrypted_content` of a reasoning item: its text as base64, for clients that drop it."""
    return base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def _reasoning_text(where: str, item: Json) -> str:
    """Return the text of a reasoning item: of its content, its summary, or what `encrypted` made."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise RejectedError(f"{where}.{name} must be a list of objects", param=f"{where}.{name}")
        if parts:
            texts = (_string(f"{where}.{name}[{i}]", part, "text") for i, part in enumerate(parts))
            return "\n".join(texts)
    if item.get("encrypted_content") is None:
        return ""
    try:
        return base64.b64decode(_string(where, item, "encrypted_content"), validate=True).decode()
    except (binascii.Error, ValueError):
        name = f"{where}.encrypted_content"
        raise RejectedError(f"{name} was not made by this server; leave it out", param=name) from None
