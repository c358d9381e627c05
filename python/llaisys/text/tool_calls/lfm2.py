"""Tool calls of LFM2 and LFM2.5.

`<|tool_call_start|>[name(key="value"), name()]<|tool_call_end|>` anywhere in the completion. The list has the
form of Python, or, if the system prompt asks for it, of JSON: `{"name": ..., "arguments": {...}}`. Source:
LiquidAI's model cards of LFM2 and LFM2.5.
"""

from __future__ import annotations

from collections.abc import Collection

from llaisys.output_parts import ToolCall
from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.pythonic import keyword_rules, parsed_calls
from llaisys.text.tool_calls.scanning import BracketEnd, Scan, TagParser, json_value, named_call

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
GRAMMAR = CallGrammar(
    before="{name}(", after=")", between=", ", begin=f"{OPEN}[", end=f"]{CLOSE}", arguments=keyword_rules
)


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""
    return TagParser([OPEN], lambda: _Calls(names))


class _Calls:
    """A CallScanner. At the end of a completion, a list without its closing tag counts."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._list = BracketEnd(opens="[{(", quotes="\"'")

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """See CallScanner."""
        body = text[len(OPEN) :].lstrip()
        if not body:
            return None
        if body[0] != "[":
            return Scan(len(OPEN))
        end = self._list.find(body)
        if end is None:
            return None
        rest = body[end:].lstrip()
        if not rest.startswith(CLOSE):
            if not CLOSE.startswith(rest):
                return Scan(len(text) - len(rest))
            if not is_end:
                return None
        calls = parsed_calls(body[:end], self._names) or _json_calls(body[:end], self._names)
        n = len(text) - len(rest) + min(len(CLOSE), len(rest))
        return Scan(n, None if calls is None else tuple(calls))


def _json_calls(text: str, names: Collection[str]) -> list[ToolCall] | None:
    """Return the calls of a JSON list, or None if it has anything else or is empty."""
    try:
        given = json_value(text)
    except (ValueError, RecursionError):
        return None
    found = [
        named_call(each.get("name"), each.get("arguments"), names) if isinstance(each, dict) else None
        for each in (given if isinstance(given, list) else [])
    ]
    calls = [call for call in found if call is not None]
    return calls if calls and len(calls) == len(found) else None
