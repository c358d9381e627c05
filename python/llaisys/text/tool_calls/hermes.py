"""Hermes' tool calls, which Qwen 2.5 and Qwen 3 use, too.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in the completion. Source: the chat
template of Qwen 2.5.
"""

from __future__ import annotations

from collections.abc import Collection

from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.scanning import BracketEnd, Scan, TagParser, json_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
GRAMMAR = CallGrammar(
    before=f'{OPEN}\n{{"name": "{{name}}", "arguments": ', after=f"}}\n{CLOSE}", between="\n"
)


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""
    return TagParser([OPEN], lambda: _Call(names))


class _Call:
    """A CallScanner. At the end of a completion, a call without its closing tag counts."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = BracketEnd()

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """See CallScanner."""
        body = text[len(OPEN) :].lstrip()
        if not body:
            return None
        if body[0] != "{":
            return Scan(len(OPEN))
        end = self._object.find(body)
        if end is None:
            return None
        rest = body[end:].lstrip()
        if not rest.startswith(CLOSE):
            if not CLOSE.startswith(rest):
                return Scan(len(text) - len(rest))
            if not is_end:
                return None
        call = json_call(body[:end], "arguments", self._names)
        n = len(text) - len(rest) + min(len(CLOSE), len(rest))
        return Scan(n, None if call is None else (call,))
