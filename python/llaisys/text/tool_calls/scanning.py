"""Scanning of a growing completion: tags, JSON objects, and a parser of calls that begin with a tag."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from llaisys.output_parts import Content, OutputPart, ToolCall


def partial_tag_len(text: str, tag: str) -> int:
    """Return the length of the end of `text` that may start `tag`, with the whitespace before it."""
    n = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return len(text) - len(text[: len(text) - n].rstrip())


@dataclass(slots=True)
class BracketEnd:
    """Finds the end of the object or list at the start of a growing text; reads each character once.

    `opens`: brackets that nest. `quotes`: characters that begin and end a string.
    """

    opens: str = "{["
    quotes: str = '"'
    at: int = 0
    depth: int = 0
    quote: str = ""  # of the open string
    escaped: bool = False
    end: int | None = None

    def find(self, text: str) -> int | None:
        """Return the index after the last bracket, None while it is open. `text` only grows."""
        while self.end is None and self.at < len(text):
            character = text[self.at]
            self.at += 1
            if self.quote:
                if character == self.quote and not self.escaped:
                    self.quote = ""
                self.escaped = character == "\\" and not self.escaped
            elif character in self.quotes:
                self.quote = character
            elif character in self.opens:
                self.depth += 1
            elif character in "}])":
                self.depth -= 1
                if self.depth <= 0:
                    self.end = self.at
        return self.end


@dataclass(frozen=True, slots=True)
class Scan:
    """A scanned part of a completion.

    - `n`: its length. `calls`: its calls; None if it is content.
    - `next`: scanner of the text that follows without a tag, as in a list of calls.
    """

    n: int
    calls: tuple[ToolCall, ...] | None = None
    next: CallScanner | None = None


class CallScanner(Protocol):
    """Scans one call."""

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """Return what `text` begins with, or None if that needs more text.

        `text` begins with a tag, and only grows until the scan. `is_end`: it does not grow anymore.
        """


class TagParser:
    """Parses content and calls that begin with a tag (an OutputParser).

    Whitespace around a call is dropped; an invalid call is content.
    """

    def __init__(self, tags: Sequence[str], new_scanner: Callable[[], CallScanner]) -> None:
        self._tags = tags
        self._new_scanner = new_scanner
        self._text = ""  # not emitted yet
        self._scanner: CallScanner | None = None  # set after a tag
        self._after_call = False

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        while self._step(parts, is_end=False):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """See OutputParser."""
        parts: list[OutputPart] = []
        while self._step(parts, is_end=True):
            pass
        # The rest is whitespace, the start of a tag, or an open call with its tag.
        if not (cut and self._text.strip()):
            self._emit_content(parts, len(self._text))
        return parts

    def _step(self, parts: list[OutputPart], *, is_end: bool) -> bool:
        """Parse one part; return False if that needs more text."""
        if self._scanner is None:
            at = min((at for tag in self._tags if (at := self._text.find(tag)) >= 0), default=-1)
            if at < 0:
                n_held = max(partial_tag_len(self._text, tag) for tag in self._tags)
                self._emit_content(parts, len(self._text) - n_held)
                return False
            self._emit_content(parts, len(self._text[:at].rstrip()))
            self._scanner = self._new_scanner()
            return True
        body = self._text.lstrip()
        scan = self._scanner.scan(body, is_end=is_end)
        if scan is None:
            return False
        self._scanner = scan.next
        n = len(self._text) - len(body) + scan.n
        if scan.calls is None:
            self._emit_content(parts, n)
            return True
        parts += scan.calls
        self._text, self._after_call = self._text[n:], True
        return True

    def _emit_content(self, parts: list[OutputPart], n: int) -> None:
        """Emit the first `n` characters as content."""
        text, self._text = self._text[:n], self._text[n:]
        if self._after_call:
            text = text.lstrip()
        if text:
            parts.append(Content(text))
            self._after_call = False


@dataclass(slots=True)
class EnclosedScanner:
    """A CallScanner of calls in brackets between two tags.

    At the end of a completion, calls without the closing tag count.

    - `brackets`: finds the end of the calls; `first`: the bracket that begins them.
    - `parse`: returns the calls in a text from the first to the last bracket, or None if it is content.
    """

    open: str
    close: str
    first: str
    parse: Callable[[str], Sequence[ToolCall] | None]
    brackets: BracketEnd = field(default_factory=BracketEnd)

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """See CallScanner."""
        body = text[len(self.open) :].lstrip()
        if not body:
            return None
        if body[0] != self.first:
            return Scan(len(self.open))
        end = self.brackets.find(body)
        if end is None:
            return None
        rest = body[end:].lstrip()
        if not rest.startswith(self.close):
            if not self.close.startswith(rest):
                return Scan(len(text) - len(rest))
            if not is_end:
                return None
        calls = self.parse(body[:end])
        n = len(text) - len(rest) + min(len(self.close), len(rest))
        return Scan(n, None if calls is None else tuple(calls))


def json_value(text: str) -> object:
    """Return the value of a JSON text. Raises ValueError or RecursionError."""
    value: object = json.loads(text, parse_constant=_reject_constant)
    return value


def json_call(text: str, key: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that a JSON object contains: its name, and its arguments in the field `key`."""
    try:
        return object_call(json_value(text), key, names)
    except (ValueError, RecursionError):
        return None


def object_call(given: object, key: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that a parsed JSON object contains, as `json_call`; None for any other value."""
    if not isinstance(given, dict):
        return None
    return named_call(given.get("name"), given.get(key), names)


def named_call(name: object, arguments: object, names: Collection[str]) -> ToolCall | None:
    """Return the call of a function, or None if it is not one of `names` or the arguments are no object."""
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
