"""What a chat request says to the template, bounded; the template's own room checks each message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.errors import RejectedError

RESERVED_KWARGS = frozenset(
    {
        "self",
        "chat_template",
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
    }
)


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages under the names that templates know: reasoning text is `reasoning_content`, which some
    servers call `reasoning`."""
    return [_with_reasoning(message) for message in messages]


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    rest = {name: value for name, value in message.items() if name not in ("reasoning", "reasoning_content")}
    return {**rest, "reasoning_content": reasoning} if isinstance(reasoning, str) else rest


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text that `echo` puts in front of an answer: that of a last message of the assistant's."""
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


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
