"""Calls of tools in an answer: the grammar that makes a model write them, the parsers that find them.

Two formats. Hermes, which Qwen learnt too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`,
anywhere in the answer. Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several with `;`
between.
Sources: the chat templates of Qwen 2.5 and Llama 3.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from llaisys.types import JSON_STYLE, Content, Part, PartParser, ToolCall

ToolFormat: TypeAlias = Literal["hermes", "llama3_json"]

# Calls in one answer that a grammar allows: a model that repeats itself has to end.
CALLS_MAX = 16
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
# The beginning of a call in Llama 3's format, wherever it was cut.
_LLAMA_BEGIN = re.compile(
    r"""\{\s* (?: $
        | "(?P<key>[a-z]*)$
        | "name"\s* (?: $ | :\s* (?: $ | "(?P<name>[^"\\]*)(?P<closed>"|$) ) )
        | "type"\s* (?: $ | :\s* (?: $ | "(?: [a-z]*$ | function" ) ) )
        | "parameters"
    )""",
    re.VERBOSE,
)


def tool_grammar(format: ToolFormat, tools: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> str:
    """Lark: an answer that is a call, or with `parallel` 1 to 16 of them. `tools`: name -> JSON schema of its
    arguments, an object's."""
    key = "arguments" if format == "hermes" else "parameters"
    before, between, after = (
        ("", "; ", "") if format == "llama3_json" else (f"{_OPEN}\n", "\n", f"\n{_CLOSE}")
    )
    more = f" ({json.dumps(between)} call){{0,{CALLS_MAX - 1}}}" if parallel else ""
    lines = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools.items()):
        head = f'{before}{{"name": {json.dumps(name)}, "{key}": '
        styled = {**schema, "type": "object", "x-guidance": dict(JSON_STYLE)}
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + after)}")
        lines.append(f"arguments_{i}: %json {json.dumps(styled)}")
    return "\n".join(lines) + "\n"


def tool_parser(format: ToolFormat, names: Collection[str]) -> PartParser:
    """A parser of one answer. Only calls of these `names` count; all else is content."""
    return HermesParser(names) if format == "hermes" else Llama3Parser(names)


def held_back(text: str, tag: str) -> int:
    """Characters at the end of `text` that may yet belong to `tag`: its beginning, the space before it."""
    n = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return len(text) - len(text[: len(text) - n].rstrip())


@dataclass(slots=True)
class _ObjectEnd:
    """Finds the end of the JSON object that a growing text begins with, looking at each character once."""

    at: int = 0
    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    end: int | None = None

    def find(self, text: str) -> int | None:
        """The index behind the object, None while it is open. `text` begins with `{`, and only grows."""
        while self.end is None and self.at < len(text):
            character = text[self.at]
            self.at += 1
            if self.in_string:
                self.in_string = self.escaped or character != '"'
                self.escaped = character == "\\" and not self.escaped
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.end = self.at
        return self.end


class HermesParser:
    """Content, and calls in their tags. The space around a call is dropped; what is no call is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not yet told
        self._object: _ObjectEnd | None = None  # set inside a tag
        self._after_call = False

    def push(self, text: str) -> list[Part]:
        """As PartParser."""
        self._text += text
        parts: list[Part] = []
        while self._step(parts, over=False):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> list[Part]:
        """As PartParser. A call whose closing tag is missing counts."""
        parts: list[Part] = []
        while self._step(parts, over=True):
            pass
        # What is left is space, perhaps with the beginning of a tag behind it, or a call from its tag on.
        if not (cut and self._text.strip()):
            self._tell(parts, len(self._text))
        return parts

    def _step(self, parts: list[Part], *, over: bool) -> bool:
        """One step along the text; False if it cannot go on before there is more of it."""
        if self._object is None:
            at = self._text.find(_OPEN)
            if at < 0:
                self._tell(parts, len(self._text) - held_back(self._text, _OPEN))
                return False
            self._tell(parts, len(self._text[:at].rstrip()))
            self._object = _ObjectEnd()
            return True
        begin = self._text.index(_OPEN) + len(_OPEN)
        body = self._text[begin:].lstrip()
        if not body:
            return False
        if body[0] != "{":
            return self._no_call(parts, begin)
        end = self._object.find(body)
        if end is None:
            return False
        rest = body[end:].lstrip()
        if not rest.startswith(_CLOSE):
            if not _CLOSE.startswith(rest):
                return self._no_call(parts, len(self._text) - len(rest))
            if not over:
                return False
        call = _call(body[:end], "arguments", self._names)
        n_told = len(self._text) - len(rest) + min(len(_CLOSE), len(rest))
        if call is None:
            return self._no_call(parts, n_told)
        parts.append(call)
        self._text, self._object, self._after_call = self._text[n_told:], None, True
        return True

    def _no_call(self, parts: list[Part], n: int) -> bool:
        self._object = None
        self._tell(parts, n)
        return True

    def _tell(self, parts: list[Part], n: int) -> None:
        """The first `n` characters are content."""
        text, self._text = self._text[:n], self._text[n:]
        if self._after_call:
            text = text.lstrip()
        if text:
            parts.append(Content(text))
            self._after_call = False


class Llama3Parser:
    """Calls while there are only calls; from the first thing that is none on, content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not yet told
        self._object = _ObjectEnd()
        self._n_calls = 0
        self._is_content = False

    def push(self, text: str) -> list[Part]:
        """As PartParser."""
        self._text += text
        parts: list[Part] = []
        while not self._is_content and self._step(parts):
            pass
        if self._is_content:
            parts += self._rest()
        return parts

    def finish(self, *, cut: bool = False) -> list[Part]:
        """As PartParser."""
        body = self._body()
        if (self._n_calls and not body) or (cut and self._text.strip() and self._may_become_call(body)):
            return []
        return self._rest()

    def _body(self) -> str:
        """What is not yet told, from the next call on, if it is one."""
        body = self._text.lstrip("; \t\r\n" if self._n_calls else None)
        if self._n_calls == 0 and body.startswith(_PYTHON_TAG):
            body = body[len(_PYTHON_TAG) :].lstrip()
        return body

    def _may_become_call(self, body: str) -> bool:
        """True for the beginning of a call, or of the tag before it. Other JSON is content."""
        if self._n_calls == 0 and _PYTHON_TAG.startswith(body):
            return True
        begin = _LLAMA_BEGIN.match(body)
        if begin is None:
            return False
        key, name = begin["key"], begin["name"]
        if name is not None:
            return name in self._names if begin["closed"] else any(n.startswith(name) for n in self._names)
        return key is None or any(n.startswith(key) for n in ("name", "type", "parameters"))

    def _step(self, parts: list[Part]) -> bool:
        """One step along the text; False if it cannot go on before there is more of it."""
        body = self._body()
        if not body or (self._n_calls == 0 and _PYTHON_TAG.startswith(body)):
            return False
        end = self._object.find(body) if body[0] == "{" else len(body)
        if end is None:
            return False
        call = _call(body[:end], "parameters", self._names)
        if call is None:
            self._is_content = True
            return False
        parts.append(call)
        self._n_calls += 1
        self._text, self._object = body[end:], _ObjectEnd()
        return True

    def _rest(self) -> list[Part]:
        text, self._text = self._text, ""
        return [Content(text)] if text else []


def _call(text: str, key: str, names: Collection[str]) -> ToolCall | None:
    """The call that a JSON text is, None if it is none."""
    try:
        given = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    name, arguments = given.get("name"), given.get(key)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
