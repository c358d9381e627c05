"""Tool calls in a completion: the grammar that enforces them, and the parsers that find them.

Two formats. Hermes, which Qwen uses too: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere
in the completion. Llama 3: the completion is `{"name": ..., "parameters": {...}}`, or several separated by
`;`. Sources: the chat templates of Qwen 2.5 and Llama 3.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from llaisys.output_parts import Content, OutputParser, OutputPart, ToolCall
from llaisys.sampling_params import JSON_STYLE

ToolFormat: TypeAlias = Literal["hermes", "llama3_json"]

# Maximum calls in one completion under a grammar, so that a model that repeats itself ends.
CALLS_MAX = 16
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
# Any prefix of a call in Llama 3's format.
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
    """Return a Lark grammar for one call, or with `parallel` for 1 to 16 calls.

    `tools`: name -> JSON schema of the arguments, which are an object.
    """
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


def tool_parser(format: ToolFormat, names: Collection[str]) -> OutputParser:
    """Return a parser of one completion. Calls of tools that are not in `names` are content."""
    return HermesParser(names) if format == "hermes" else Llama3Parser(names)


def partial_tag_len(text: str, tag: str) -> int:
    """Return the length of the end of `text` that may start `tag`, with the whitespace before it."""
    n = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return len(text) - len(text[: len(text) - n].rstrip())


@dataclass(slots=True)
class _ObjectEnd:
    """Finds the end of the JSON object at the start of a growing text; reads each character once."""

    at: int = 0
    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    end: int | None = None

    def find(self, text: str) -> int | None:
        """Return the index after the object, None while it is open. `text` starts with `{` and only grows."""
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
    """Parses content and calls in tags. Whitespace around a call is dropped; an invalid call is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not emitted yet
        self._object: _ObjectEnd | None = None  # set after an opening tag
        self._after_call = False

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        while self._step(parts, is_end=False):
            pass
        return parts

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """See OutputParser. A call without its closing tag counts."""
        parts: list[OutputPart] = []
        while self._step(parts, is_end=True):
            pass
        # The rest is whitespace, the start of a tag, or an open call with its tag.
        if not (cut and self._text.strip()):
            self._emit_content(parts, len(self._text))
        return parts

    def _step(self, parts: list[OutputPart], *, is_end: bool) -> bool:
        """Parse one part; return False if that needs more text."""
        if self._object is None:
            at = self._text.find(_OPEN)
            if at < 0:
                self._emit_content(parts, len(self._text) - partial_tag_len(self._text, _OPEN))
                return False
            self._emit_content(parts, len(self._text[:at].rstrip()))
            self._object = _ObjectEnd()
            return True
        begin = self._text.index(_OPEN) + len(_OPEN)
        body = self._text[begin:].lstrip()
        if not body:
            return False
        if body[0] != "{":
            return self._emit_invalid_call(parts, begin)
        end = self._object.find(body)
        if end is None:
            return False
        rest = body[end:].lstrip()
        if not rest.startswith(_CLOSE):
            if not _CLOSE.startswith(rest):
                return self._emit_invalid_call(parts, len(self._text) - len(rest))
            if not is_end:
                return False
        call = _call(body[:end], "arguments", self._names)
        n_consumed = len(self._text) - len(rest) + min(len(_CLOSE), len(rest))
        if call is None:
            return self._emit_invalid_call(parts, n_consumed)
        parts.append(call)
        self._text, self._object, self._after_call = self._text[n_consumed:], None, True
        return True

    def _emit_invalid_call(self, parts: list[OutputPart], n: int) -> bool:
        self._object = None
        self._emit_content(parts, n)
        return True

    def _emit_content(self, parts: list[OutputPart], n: int) -> None:
        """Emit the first `n` characters as content."""
        text, self._text = self._text[:n], self._text[n:]
        if self._after_call:
            text = text.lstrip()
        if text:
            parts.append(Content(text))
            self._after_call = False


class Llama3Parser:
    """Parses calls at the start of a completion; all text from the first non-call on is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not emitted yet
        self._object = _ObjectEnd()
        self._n_calls = 0
        self._is_content = False

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        while not self._is_content and self._step(parts):
            pass
        if self._is_content:
            parts += self._rest()
        return parts

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """See OutputParser."""
        body = self._body()
        if (self._n_calls and not body) or (cut and self._text.strip() and self._may_become_call(body)):
            return []
        return self._rest()

    def _body(self) -> str:
        """Return the text that was not emitted yet, without the separator or tag before a call."""
        body = self._text.lstrip("; \t\r\n" if self._n_calls else None)
        if self._n_calls == 0 and body.startswith(_PYTHON_TAG):
            body = body[len(_PYTHON_TAG) :].lstrip()
        return body

    def _may_become_call(self, body: str) -> bool:
        """Return True for a prefix of a call, or of the tag before it. Other JSON is content."""
        if self._n_calls == 0 and _PYTHON_TAG.startswith(body):
            return True
        begin = _LLAMA_BEGIN.match(body)
        if begin is None:
            return False
        key, name = begin["key"], begin["name"]
        if name is not None:
            return name in self._names if begin["closed"] else any(n.startswith(name) for n in self._names)
        return key is None or any(n.startswith(key) for n in ("name", "type", "parameters"))

    def _step(self, parts: list[OutputPart]) -> bool:
        """Parse one part; return False if that needs more text."""
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

    def _rest(self) -> list[OutputPart]:
        text, self._text = self._text, ""
        return [Content(text)] if text else []


def _call(text: str, key: str, names: Collection[str]) -> ToolCall | None:
    """Return the call that a JSON text contains, or None."""
    try:
        given = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    name, arguments = given.get("name"), given.get(key)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
