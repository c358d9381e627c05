"""What is checked of a text before it goes further."""

from __future__ import annotations

from typing import Any

from llaisys.errors import RejectedError


def text_of(where: str, value: Any) -> str:
    """`value` if it is a text that can be encoded; RejectedError naming `where` if not.

    A JSON escape can carry half a surrogate pair, which no tokenizer and no answer can hold.
    """
    if not isinstance(value, str):
        raise RejectedError(f"{where} must be a string", param=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RejectedError(f"{where} holds half a surrogate pair, which is not text", param=where) from None
    return value
