"""Mistral's tool calls.

Until tokenizer v7: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. From v11:
`[TOOL_CALLS]name[ARGS]{...}` for each call, in v11 with `[CALL_ID]id` after the name. Sources: the chat
templates of Mistral 7B v0.3, Mistral Small 3.2 and Ministral 3. The tags are special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.scanning import (
    BracketEnd,
    Scan,
    TagParser,
    json_call,
    json_value,
    named_call,
)

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
TAGS = (OPEN, ARGS, CALL_ID)
LIST_GRAMMAR = CallGrammar(
    begin=f"{OPEN}[", before='{"name": "{name}", "arguments": ', after="}", between=", ", end="]"
)
ARGS_GRAMMAR = CallGrammar(before=f"{OPEN}{{name}}{ARGS}", after="", between="")

_HEAD = re.compile(
    rf"(?P<name>[\w-]+)(?:{re.escape(CALL_ID)}[\w-]*)?(?:{re.escape(ARGS)})?\s*(?P<arguments>\{{)?"
)


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""
    return TagParser([OPEN], lambda: _Call(names))


class _Call:
    """A CallScanner: decides the form, then scans its first call."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = BracketEnd()

    def scan(self, text: str, *, is_end: bool) -> Scan | None:  # noqa: ARG002 -- nothing follows a call
        """See CallScanner."""
        body = text[len(OPEN) :].lstrip()
        if not body:
            return None
        if body[0] == "[":
            return _list_scan(len(text) - len(body) + 1, text, self._names, self._object)
        return self._args(text, body)

    def _args(self, text: str, body: str) -> Scan | None:
        head = _HEAD.match(body)
        if head is None or not _is_prefix(head["name"], self._names, is_whole=head.end("name") < len(body)):
            return Scan(len(OPEN))
        if head["arguments"] is None:
            rest = body[head.end() :]
            is_open = not rest or any(tag.startswith(rest) for tag in (ARGS, CALL_ID))
            return None if is_open else Scan(len(OPEN))
        at = head.start("arguments")
        end = self._object.find(body[at:])
        if end is None:
            return None
        n = len(text) - len(body) + at + end
        try:
            call = named_call(head["name"], json_value(body[at : at + end]), self._names)
        except (ValueError, RecursionError):
            call = None
        return Scan(n, None if call is None else (call,))


class _Item:
    """A CallScanner of the calls after the first of a list."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = BracketEnd()

    def scan(self, text: str, *, is_end: bool) -> Scan | None:  # noqa: ARG002 -- nothing follows a call
        """See CallScanner."""
        if text.startswith("]"):
            return Scan(1, ())
        if not text.startswith(","):
            return Scan(0) if text else None
        return _list_scan(1, text, self._names, self._object)


def _list_scan(at: int, text: str, names: Collection[str], bracket: BracketEnd) -> Scan | None:
    """Scan the object of a list after the first `at` characters."""
    body = text[at:].lstrip()
    if not body:
        return None
    if body[0] != "{":
        return Scan(at)
    end = bracket.find(body)
    if end is None:
        return None
    call = json_call(body[:end], "arguments", names)
    n = len(text) - len(body) + end
    return Scan(n) if call is None else Scan(n, (call,), _Item(names))


def _is_prefix(name: str, names: Collection[str], *, is_whole: bool) -> bool:
    return name in names if is_whole else any(each.startswith(name) for each in names)
