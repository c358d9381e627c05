"""The `messages` of a chat request, checked and brought into the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.checks import text_of

MESSAGES_MAX = 2048

# Role on the wire -> role that templates know. OpenAI's `developer` took the place of `system`.
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
UNSUPPORTED_ROLES = frozenset({"tool", "function"})
RESERVED_KWARGS = frozenset(
    {"chat_template", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`[{"role", "content"}, ...]` with content as one string.

    Raises RejectedError or UnsupportedError naming the message and the field, as in `messages[2].content`.
    """
    if not messages:
        raise RejectedError("messages is empty; send at least one", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise RejectedError(f"messages has {len(messages)} entries, at most {MESSAGES_MAX}", param="messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if isinstance(role, str) and role in UNSUPPORTED_ROLES:
        raise UnsupportedError(f"{where}.role is {role!r}; tools are not supported", param=f"{where}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise RejectedError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise UnsupportedError(f"{where}.{name} is not supported", param=f"{where}.{name}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    out: dict[str, Any] = {"role": ROLES[role], "content": _text(f"{where}.content", content)}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None:
        out["reasoning_content"] = text_of(f"{where}.reasoning_content", reasoning)
    if message.get("name") is not None:
        out["name"] = text_of(f"{where}.name", message["name"])
    return out


def _text(where: str, content: Any) -> str:
    """A string as it is; text parts joined by a newline, as vLLM does."""
    if isinstance(content, list):
        return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))
    return text_of(where, content)


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return text_of(where, part)
    if not isinstance(part, Mapping):
        raise RejectedError(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    if kind == "text":
        return text_of(f"{where}.text", part.get("text"))
    if kind is None:
        raise RejectedError(f"{where}.type is missing", param=f"{where}.type")
    raise UnsupportedError(f"{where}.type: only text parts are supported", param=f"{where}.type")


def template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs` for the template. Names that would replace what we pass ourselves are refused;
    a template never comes from a request."""
    for name in kwargs or {}:
        if name in RESERVED_KWARGS:
            where = f"chat_template_kwargs.{name}"
            raise RejectedError(f"{where} cannot be set by a request", param=where)
    return dict(kwargs or {})


def generation_prompt(add: bool | None, continue_final: bool | None) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message): the first is on unless the second is. Not both."""
    if add and continue_final:
        raise RejectedError(
            "add_generation_prompt and continue_final_message exclude each other",
            param="add_generation_prompt",
        )
    return (not continue_final) if add is None else add, bool(continue_final)
