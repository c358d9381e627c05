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
from llaisys.text.tool_calls.scanning import (
    BracketEnd,
    EnclosedScanner,
    TagParser,
    json_value,
    object_call,
)

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
GRAMMAR = CallGrammar(
    before="{name}(", after=")", between=", ", begin=f"{OPEN}[", end=f"]{CLOSE}", arguments=keyword_rules
)


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""

    def parse(text: str) -> list[ToolCall] | None:
        return parsed_calls(text, names) or _json_calls(text, names)

    def scanner() -> EnclosedScanner:
        return EnclosedScanner(OPEN, CLOSE, "[", parse, BracketEnd(opens="[{(", quotes="\"'"))

    return TagParser([OPEN], scanner)


def _json_calls(text: str, names: Collection[str]) -> list[ToolCall] | None:
    """Return the calls of a JSON list, or None if it has anything else or is empty."""
    try:
        given = json_value(text)
    except (ValueError, RecursionError):
        return None
    found = [object_call(each, "arguments", names) for each in given] if isinstance(given, list) else []
    calls = [call for call in found if call is not None]
    return calls if calls and len(calls) == len(found) else None
