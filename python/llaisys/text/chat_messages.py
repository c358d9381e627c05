"""Validates chat messages in OpenAI's format and converts them to the form that chat templates expect."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from llaisys.errors import RejectedError, UnsupportedError

# Types of parts with media, of OpenAI's API and of vLLM.
MEDIA = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "input_file", "file")
# Roles that OpenAI's API has. A template may take others (`ChatTemplate.render`).
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# A role is part of the prompt's structure, so it cannot contain the text of special tokens.
_ROLE = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_messages(messages: Sequence[Mapping[str, Any]], *, keep_developer: bool) -> list[dict[str, Any]]:
    """Return copies of the messages with `content` as one string; other keys stay unchanged.

    - Text parts are joined by a newline, as vLLM does. Any other part is rejected; the error names its type.
    - Arguments of tool calls become objects, as templates expect (OpenAI sends JSON in a string).
    - A role that is not in ROLES stays; the template decides.
    - Without `keep_developer`, the role `developer` becomes `system`: a template that does not know the role
      would drop the message.

    Raises RejectedError or UnsupportedError naming the message.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RejectedError(
            f"messages is of the type {type(messages).__name__}, expected a list", param="messages"
        )
    if not messages:
        raise RejectedError("messages is empty", param="messages")
    return [_check_message(i, message, keep_developer) for i, message in enumerate(messages)]


def _check_message(i: int, message: Mapping[str, Any], keep_developer: bool) -> dict[str, Any]:
    where = f"messages[{i}]"
    if not isinstance(message, Mapping):
        raise RejectedError(
            f"{where} is of the type {type(message).__name__}, expected an object", param=where
        )
    role = message.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise RejectedError(
            f"{where}.role is {_shown(role)}, expected {', '.join(ROLES)} or another name of 1 to 64 "
            "letters, digits, _ or -",
            param=f"{where}.role",
        )
    checked = dict(message)
    if role == "developer" and not keep_developer:
        checked["role"] = "system"
    checked["content"] = _text_of(f"{where}.content", message.get("content"), role)
    if message.get("tool_calls"):
        checked["tool_calls"] = [
            _with_arguments(f"{where}.tool_calls", call) for call in message["tool_calls"]
        ]
    return checked


def _text_of(where: str, content: Any, role: str) -> str | None:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return None
        raise RejectedError(f"{where} is missing", param=where)
    if not isinstance(content, Sequence):
        raise RejectedError(
            f"{where} is of the type {type(content).__name__}, expected a string or a list", param=where
        )
    return "\n".join(_text_of_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _text_of_part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        media = "; images, sound and files are not read, also by multimodal models" if kind in MEDIA else ""
        raise UnsupportedError(
            f"{where} is of type {_shown(kind)}{media}; supported are parts of type 'text'", param=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RejectedError(
            f"{where}.text is of the type {type(text).__name__}, expected a string", param=where
        )
    return text


def _shown(value: Any) -> str:
    """Return a rejected value for an error message, truncated."""
    if isinstance(value, str):
        return repr(value[:40])
    return "missing" if value is None else reprlib.repr(value)


def _with_arguments(where: str, call: Any) -> Any:
    """Return a copy of a tool call with `arguments` as an object."""
    if not isinstance(call, Mapping):
        raise RejectedError(f"{where} contains a {type(call).__name__}, expected an object", param=where)
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(f"{where}.function", call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        return {**call, "arguments": json.loads(arguments) if arguments.strip() else {}}
    except (json.JSONDecodeError, RecursionError) as e:
        raise RejectedError(f"{where}.arguments is not JSON: {e}", param=where) from e
