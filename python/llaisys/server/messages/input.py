"""Translates a request of Anthropic's Messages to a chat request.

Sources: https://docs.anthropic.com/en/api/messages and the types of the `anthropic` package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llaisys.errors import LlaisysError, RejectedError, UnsupportedError
from llaisys.server.messages.schemas import CountTokensRequest, MessagesRequest
from llaisys.server.protocol import field_names, text_of
from llaisys.server.request_schemas import ChatCompletionRequest
from llaisys.server.response_body import Json

# The first line of Claude Code's system prompt: `x-anthropic-billing-header: cc_version=2.1.177.01c;
# cc_entrypoint=cli; cch=36ee5;`. `cch` is different in each request (anthropics/claude-code#68900).
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

# Fields of a chat request -> the fields of Messages that set them.
_FIELDS = {"stop": "stop_sequences", "guided_json": "output_config.format.schema"}
_TOOL_FIELDS = {".function.parameters": ".input_schema", ".function.name": ".name"}
# Fields with the same name and meaning in both requests.
_SAME = (
    "model",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "priority",
    "cache_salt",
    "session_id",
)
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def chat_request(body: CountTokensRequest, *, drops_attribution: bool) -> ChatCompletionRequest:
    """Return the chat request of a message, or of a prompt to count.

    `drops_attribution`: leave out Claude Code's attribution line at the head of the system prompt. Raises
    RejectedError or UnsupportedError naming a field of `body`.
    """
    chat = _Conversation(_system_text(body.system, drops_attribution=drops_attribution))
    if not body.messages:
        raise RejectedError("messages is empty", param="messages")
    for i, message in enumerate(body.messages):
        chat.add(f"messages[{i}]", message)
    schema = _output_schema(body.output_config)
    choice, is_parallel = _tool_choice(body)
    if schema is not None and choice not in (None, "auto", "none"):
        raise RejectedError(
            "tool_choice and output_config.format exclude each other", param="output_config.format"
        )
    fields: Json = {name: getattr(body, name, None) for name in _SAME}
    # The values were validated as parts of `body`. One message can have many tool results, so the number of
    # messages may exceed the bound of a chat.
    return ChatCompletionRequest.model_construct(
        **fields,
        messages=chat.finish(),
        continue_final_message=chat.is_prefilled,
        stop=body.stop_sequences if isinstance(body, MessagesRequest) else None,
        guided_json=schema,
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        chat_template_kwargs={**_thinking_switches(body.thinking), **(body.chat_template_kwargs or {})},
    )


@contextmanager
def messages_field_names() -> Iterator[None]:
    """Rename the fields of a chat request, in errors raised in this context, to those of Messages."""
    try:
        with field_names(_FIELDS):
            yield
    except LlaisysError as e:
        name = next((name for name in _TOOL_FIELDS if name in (e.param or "")), None)
        if name is None:
            raise
        text, param = (each.replace(name, _TOOL_FIELDS[name]) for each in (str(e), e.param or ""))
        raise type(e)(text, param=param) from e


class _Conversation:
    """The messages of a chat. Adjacent turns of one role become one message, as in Anthropic's API."""

    def __init__(self, system: str) -> None:
        self._system = [system] if system else []
        self._messages: list[Json] = []
        self._tools: dict[str, str] = {}  # id of a tool_use -> its function
        self._last = ""  # field of the last turn

    @property
    def is_prefilled(self) -> bool:
        """Return True if the completion continues the last message."""
        return bool(self._messages[-1]["role"] == "assistant")

    def add(self, where: str, message: Mapping[str, Any]) -> None:
        """Add a turn."""
        role, blocks = message.get("role"), _blocks(f"{where}.content", message.get("content"))
        self._last = where
        match role:
            case "user":
                self._add_user(blocks)
            case "assistant":
                self._add_assistant(blocks)
            case "system":
                self._add_system(blocks)
            case _:
                raise RejectedError(
                    f"{where}.role is {str(role)[:40]!r}, allowed are user, assistant and system",
                    param=f"{where}.role",
                )

    def finish(self) -> list[Json]:
        """Return the messages of the chat, the system prompt first. Raises RejectedError for a last turn that
        nothing can follow."""
        if not self._messages:
            raise RejectedError("messages has no turn of the user", param="messages")
        last = self._messages[-1]
        if last.get("tool_calls"):
            raise RejectedError(
                f"{self._last} calls tools: the next message must have their tool_result blocks",
                param=self._last,
            )
        if self.is_prefilled and not last["content"]:
            raise RejectedError(f"{self._last} has no text that can be continued", param=self._last)
        system = [{"role": "system", "content": "\n".join(self._system)}] if self._system else []
        return [*system, *self._messages]

    def _add_user(self, blocks: Sequence[tuple[str, Json]]) -> None:
        for where, block in blocks:
            match block["type"]:
                case "text":
                    self._add_text("user", _text(where, block))
                case "tool_result":
                    self._add_result(where, block)
                case _:
                    raise _unsupported(where, block, "text and tool_result")

    def _add_system(self, blocks: Sequence[tuple[str, Json]]) -> None:
        """Add instructions of the operator. After the first turn they are marked text of the user, because
        templates accept a system message only at the beginning."""
        text = "\n".join(_text_of_block(where, block) for where, block in blocks)
        if self._messages:
            self._add_text("user", f"<system-reminder>\n{text}\n</system-reminder>")
        else:
            self._system.append(text)

    def _add_assistant(self, blocks: Sequence[tuple[str, Json]]) -> None:
        turn = self._turn("assistant", None)
        for where, block in blocks:
            match block["type"]:
                case "text":
                    self._add_text("assistant", _text(where, block))
                case "thinking":
                    thought = text_of(f"{where}.thinking", block.get("thinking"))
                    turn["reasoning"] = _joined(turn.get("reasoning"), thought)
                case "redacted_thinking":
                    pass  # encrypted by the server that wrote it
                case "tool_use":
                    turn.setdefault("tool_calls", []).append(self._call(where, block))
                case _:
                    raise _unsupported(where, block, "text, thinking, redacted_thinking and tool_use")
        if turn["content"] is None and "tool_calls" not in turn:
            turn["content"] = ""

    def _call(self, where: str, block: Mapping[str, Any]) -> Json:
        id, name = (text_of(f"{where}.{field}", block.get(field)) for field in ("id", "name"))
        arguments = block.get("input")
        if not isinstance(arguments, Mapping):
            raise RejectedError(f"{where}.input must be an object", param=f"{where}.input")
        self._tools[id] = name
        return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}

    def _add_result(self, where: str, block: Mapping[str, Any]) -> None:
        id = block.get("tool_use_id")
        if not isinstance(id, str) or id not in self._tools:
            raise RejectedError(
                f"{where}.tool_use_id is not the id of an earlier tool_use block",
                param=f"{where}.tool_use_id",
            )
        content = _blocks(f"{where}.content", block.get("content") or "")
        text = "\n".join(_text_of_block(*each) for each in content)
        text = f"Error: {text}" if block.get("is_error") else text
        self._messages.append({"role": "tool", "tool_call_id": id, "name": self._tools[id], "content": text})

    def _add_text(self, role: str, text: str) -> None:
        turn = self._turn(role, None)
        turn["content"] = _joined(turn["content"], text)

    def _turn(self, role: str, content: str | None) -> Json:
        """Return the last message if it has this role, else a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": content})
        return self._messages[-1]


def _joined(before: str | None, text: str) -> str:
    return text if before is None else f"{before}\n{text}"


def _system_text(system: str | Sequence[Json] | None, *, drops_attribution: bool) -> str:
    texts = [_text_of_block(where, block) for where, block in _blocks("system", system or "")]
    if drops_attribution:
        texts[:1] = [_ATTRIBUTION.sub("", text) for text in texts[:1]]
    return "\n".join(text for text in texts if text)


def _blocks(where: str, content: Any) -> list[tuple[str, Json]]:
    """Return the content blocks with their fields; a string is one block of text."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RejectedError(f"{where} must be a string or a list of content blocks", param=where)
    blocks = [(f"{where}[{i}]", block) for i, block in enumerate(content)]
    for at, block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RejectedError(f"{at} must be an object with a type", param=at)
    return blocks


def _text(where: str, block: Mapping[str, Any]) -> str:
    return text_of(where if where.endswith("content") else f"{where}.text", block.get("text"))


def _text_of_block(where: str, block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise _unsupported(where, block, "text")
    return _text(where, block)


def _unsupported(where: str, block: Mapping[str, Any], allowed: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where} is of type {block['type'][:40]!r}; supported blocks are {allowed}", param=where
    )


def _thinking_switches(thinking: Mapping[str, Any] | None) -> Json:
    """Return the variables with which templates turn reasoning on or off: Qwen 3's and DeepSeek V3.1's."""
    if thinking is None:
        return {}
    kind = thinking.get("type")
    if kind not in _THINKING:
        raise RejectedError(
            f"thinking.type is {str(kind)[:40]!r}, allowed are {', '.join(_THINKING)}", param="thinking.type"
        )
    return dict.fromkeys(("enable_thinking", "thinking"), _THINKING[kind])


def _output_schema(config: Mapping[str, Any] | None) -> Json | None:
    """Return the JSON schema of `output_config.format`. `output_config.effort` has no effect."""
    where = "output_config.format"
    format = (config or {}).get("format")
    if format is None:
        return None
    if not isinstance(format, Mapping) or format.get("type") != "json_schema":
        raise UnsupportedError(f"{where} must be an object of type 'json_schema'", param=where)
    schema = format.get("schema")
    if not isinstance(schema, dict):
        raise RejectedError(f"{where}.schema must be an object", param=f"{where}.schema")
    return schema


def _tool_choice(body: CountTokensRequest) -> tuple[str | Json | None, bool | None]:
    """Return `tool_choice` and `parallel_tool_calls` of a chat."""
    choice = body.tool_choice
    if choice is None:
        return None, None
    is_parallel = not choice.get("disable_parallel_tool_use")
    match choice.get("type"):
        case "auto" | "none" as mode:
            return mode, is_parallel
        case "any" if body.tools:
            return "required", is_parallel
        case "tool" if body.tools:
            return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel
        case "any" | "tool" as mode:
            raise RejectedError(f"tool_choice {mode} needs tools", param="tool_choice")
        case kind:
            raise RejectedError(
                f"tool_choice.type is {str(kind)[:40]!r}, allowed are auto, any, tool and none",
                param="tool_choice.type",
            )


def _tool(where: str, tool: Mapping[str, Any]) -> Json:
    """Return a tool as a function. Tools that Anthropic defines have no schema in the request."""
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedError(
            f"{where} is of type {str(tool['type'])[:40]!r}; supported are tools of type 'custom'",
            param=where,
        )
    if not isinstance(tool.get("input_schema"), Mapping):
        raise RejectedError(f"{where}.input_schema must be an object", param=f"{where}.input_schema")
    description = tool.get("description")
    described = {} if description is None else {"description": text_of(f"{where}.description", description)}
    return {
        "type": "function",
        "function": {"name": tool.get("name"), **described, "parameters": tool["input_schema"]},
    }
