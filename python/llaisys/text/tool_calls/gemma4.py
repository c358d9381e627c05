"""Gemma 4's tool calls.

`<|tool_call>call:name{key:value,key:value}<tool_call|>` anywhere in the completion, several without text
between them. Keys are plain text. Values are strings `<|"|>text<|"|>` without escapes, numbers, `true`,
`false`, `null`, objects `{key:value}` and lists `[value,value]`. After its calls the model writes
`<|tool_response>`, which ends the completion as `<turn|>` ends an answer. Each tag is one token: special in
a folder of Hugging Face, user-defined in a GGUF file.

More forms count: the template writes null as Python's `None` and has a variant with keys in quotes, and a
model may repeat the closing tag.

Sources: Google's page "Gemma 4 Prompt Formatting" (ai.google.dev/gemma/docs/core/prompt-formatting-gemma4);
`chat_template.jinja` and the `response_schema` in `tokenizer_config.json` of google/gemma-4-31B-it;
llama.cpp's `common/parsers/gemma4.cpp`, its cases in `tests/test-chat.cpp`, and `conversion/gemma.py` (types
of tokens); vLLM's `vllm/tool_parsers/gemma4_tool_parser.py`; Ollama's `model/parsers/gemma4.go` (repeated
closing tag).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from llaisys.text.tool_calls.scanning import Scan, TagParser, named_call

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TAGS = (OPEN, CLOSE, QUOTE)
# Tokens that end a completion.
END_TAGS = ("<turn|>", "<|tool_response>")

_CALL = "call:"
_NAME = re.compile(r"\s{0,9}(?P<name>[^\s{}<]{0,128})\s{0,9}(?P<brace>\{?)")
_DEPTH_MAX = 64
_EDGE = re.compile("|".join([*map(re.escape, TAGS), r"[{}\[\]]"]))
_QUOTE = re.compile(re.escape(QUOTE))
_EDGE_CHARS_MAX = max(map(len, TAGS))
_TOKEN = re.compile(
    r"""\s*(?: <\|"\|>(?P<text>.*?)<\|"\|>
        | (?P<mark>[\[\]{},:])
        | (?P<plain>(?:(?!<\|"\|>)[^\[\]{},:])+) )""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def writes_calls(template: str) -> bool:
    """Return True if a chat template writes calls in this format."""
    return f"{OPEN}{_CALL}" in template


def is_plain_key(key: str) -> bool:
    """Return True if a key can be parsed without quotes around it."""
    token = _TOKEN.fullmatch(key)
    return token is not None and token["plain"] == key == key.strip()


def parser(names: Collection[str]) -> TagParser:
    """Return a parser of one completion."""
    return TagParser([OPEN], lambda: _Call(names))


class _Call:
    """A CallScanner. A call without its closing tag counts before another call and at the end."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._arguments = _ArgumentsEnd()

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """See CallScanner."""
        body = text[len(OPEN) :].lstrip()
        if not body.startswith(_CALL):
            return None if _CALL.startswith(body) else Scan(len(OPEN))
        head = _NAME.match(body, len(_CALL))
        if head is None or (not head["brace"] and head.end() < len(body)):
            return Scan(len(OPEN))
        if not head["brace"]:
            return None
        at = len(text) - len(body) + head.start("brace")
        end = self._arguments.find(text, at)
        if end is None:
            return None
        if self._arguments.depth:
            return Scan(end)
        rest = text[end:].lstrip()
        if not rest.startswith((CLOSE, OPEN)):
            if not (CLOSE.startswith(rest) or OPEN.startswith(rest)):
                return Scan(len(text) - len(rest))
            if not is_end:
                return None
        n_close = 0 if rest.startswith(OPEN) else min(len(CLOSE), len(rest))
        n = len(text) - len(rest) + n_close
        try:
            call = named_call(head["name"], _Reader(text[at:end]).arguments(), self._names)
        except ValueError:
            call = None
        return Scan(n) if call is None else Scan(n, (call,), _AfterCall())


class _AfterCall:
    """A CallScanner that drops further closing tags after a call."""

    def scan(self, text: str, *, is_end: bool) -> Scan | None:  # noqa: ARG002 -- a partial tag is content
        """See CallScanner."""
        if text.startswith(CLOSE):
            return Scan(len(CLOSE), (), self)
        return None if CLOSE.startswith(text) else Scan(0)


@dataclass(slots=True)
class _ArgumentsEnd:
    """Finds the end of the arguments of a call in a growing text; reads each character once."""

    at: int = 0
    depth: int = 0
    is_in_string: bool = False
    end: int | None = None

    def find(self, text: str, begin: int) -> int | None:
        """Return the index after the last bracket, None while it is open. `begin`: index of the first one.

        A tag of a call outside of a string ends arguments that lack a bracket; `depth` is not 0 then. The
        index is that of an opening tag, or the one after a closing tag.
        """
        self.at = max(self.at, begin)
        while self.end is None:
            edge = (_QUOTE if self.is_in_string else _EDGE).search(text, self.at)
            if edge is None:
                self.at = max(self.at, len(text) - _EDGE_CHARS_MAX + 1)
                return None
            self.at = edge.end()
            mark = edge[0]
            if mark == QUOTE:
                self.is_in_string = not self.is_in_string
            elif mark in "{[":
                self.depth += 1
            elif mark in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.end = self.at
            else:
                self.end = edge.start() if mark == OPEN else edge.end()
        return self.end


class _Reader:
    """Reads the arguments of a call. Raises ValueError for a text in another form."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"an open string at {at}")
            kind = str(token.lastgroup)
            self._tokens.append((kind, token[kind] if kind == "text" else token[kind].strip()))
            at = token.end()
        self._tokens.reverse()

    def arguments(self) -> dict[str, Any]:
        """Read the whole text."""
        self._expect("{")
        values = self._object(0)
        if self._tokens:
            raise ValueError("text after the arguments")
        return values

    def _object(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._skip("}"):
            kind, key = self._next()
            if kind == "mark":
                raise ValueError(f"{key} in place of a key")
            self._expect(":")
            values[key] = self._value(depth + 1)
            if not self._skip(","):
                self._expect("}")
                break
        return values

    def _list(self, depth: int) -> list[Any]:
        values: list[Any] = []
        while not self._skip("]"):
            values.append(self._value(depth + 1))
            if not self._skip(","):
                self._expect("]")
                break
        return values

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError("nested too deep")
        kind, token = self._next()
        match kind:
            case "text":
                return token
            case "mark" if token == "{":
                return self._object(depth)
            case "mark" if token == "[":
                return self._list(depth)
            case "plain" if token in _CONSTANTS:
                return _CONSTANTS[token]
            case "plain" if _NUMBER.fullmatch(token):
                return _number(token)
        raise ValueError(f"{token} is not a value")

    def _next(self) -> tuple[str, str]:
        if not self._tokens:
            raise ValueError("unexpected end")
        return self._tokens.pop()

    def _skip(self, mark: str) -> bool:
        is_next = bool(self._tokens) and self._tokens[-1] == ("mark", mark)
        if is_next:
            self._tokens.pop()
        return is_next

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise ValueError(f"no {mark}")


def _number(text: str) -> int | float:
    """Return the value of a number. Raises ValueError for one that JSON cannot have."""
    if not any(character in text for character in ".eE"):
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large")
    return number
