"""DeepSeek's tool calls.

All calls are between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

- V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, the arguments in a fenced block of JSON, and
  `<｜tool▁call▁end｜>`.
- V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.

Sources: the chat templates of DeepSeek V3, R1 and V3.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.scanning import BracketEnd, Scan, TagParser, json_value, named_call

ALL_OPEN, ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
TAGS = (ALL_OPEN, ALL_CLOSE, OPEN, CLOSE, SEPARATOR)
FENCE = "```json\n"
FENCED_GRAMMAR = CallGrammar(
    begin=ALL_OPEN,
    before=f"{OPEN}function{SEPARATOR}{{name}}\n{FENCE}",
    after=f"\n```{CLOSE}",
    between="\n",
    end=ALL_CLOSE,
)
PLAIN_GRAMMAR = CallGrammar(
    begin=ALL_OPEN, before=f"{OPEN}{{name}}{SEPARATOR}", after=CLOSE, between="", end=ALL_CLOSE
)

_HEAD = re.compile(
    rf"{OPEN}\s{{0,9}}(?:function\s{{0,9}}{SEPARATOR}\s{{0,9}}(?P<fenced>[\w-]{{1,128}})\s{{0,9}}```json\s{{0,9}}"
    rf"|(?P<plain>[\w-]{{1,128}})\s{{0,9}}{SEPARATOR}\s{{0,9}})(?=\{{)"
)
# No head is longer.
_HEAD_CHARS_MAX = 256


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""
    return TagParser([ALL_OPEN, OPEN, ALL_CLOSE], lambda: _Call(names))


class _Call:
    """A CallScanner. At the end of a completion, a call without its closing tag counts."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = BracketEnd()

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """See CallScanner."""
        if text.startswith(ALL_CLOSE):
            return Scan(len(ALL_CLOSE), ())
        if text.startswith(ALL_OPEN):
            return self._scan_first(text)
        head = _HEAD.match(text)
        if head is None:
            is_open = len(text) <= _HEAD_CHARS_MAX and "{" not in text
            return None if is_open else Scan(len(OPEN))
        end = self._object.find(text[head.end() :])
        if end is None:
            return None
        rest = re.sub(r"\A\s*(?:```)?\s*" if head["fenced"] else r"\A\s*", "", text[head.end() + end :])
        if not rest.startswith(CLOSE):
            if not (CLOSE.startswith(rest) or (head["fenced"] and "```".startswith(rest))):
                return Scan(len(text) - len(rest))
            if not is_end:
                return None
        n = len(text) - len(rest) + min(len(CLOSE), len(rest))
        try:
            arguments = json_value(text[head.end() : head.end() + end])
        except (ValueError, RecursionError):
            return Scan(n)
        call = named_call(head["fenced"] or head["plain"], arguments, self._names)
        return Scan(n, None if call is None else (call,))

    def _scan_first(self, text: str) -> Scan | None:
        """Drop the tag before the first call."""
        rest = text[len(ALL_OPEN) :].lstrip()
        if rest.startswith(OPEN):
            return Scan(len(text) - len(rest), (), self)
        return None if OPEN.startswith(rest) else Scan(len(ALL_OPEN))
