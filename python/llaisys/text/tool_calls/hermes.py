"""Hermes' tool calls, which Qwen 2.5 and Qwen 3 use, too.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere in the completion. Source: the chat
template of Qwen 2.5.
"""

from __future__ import annotations

from collections.abc import Collection

from llaisys.output_parts import ToolCall
from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.scanning import EnclosedScanner, TagParser, json_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
GRAMMAR = CallGrammar(
    before=f'{OPEN}\n{{"name": "{{name}}", "arguments": ', after=f"}}\n{CLOSE}", between="\n"
)


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""

    def parse(text: str) -> list[ToolCall] | None:
        call = json_call(text, "arguments", names)
        return None if call is None else [call]

    return TagParser([OPEN], lambda: EnclosedScanner(OPEN, CLOSE, "{", parse))
