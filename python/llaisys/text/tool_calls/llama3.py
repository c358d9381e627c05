"""Llama 3's tool calls.

The completion is `{"name": ..., "parameters": {...}}`, or several separated by `;`. Source: the chat template
of Llama 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from llaisys.output_parts import Content, OutputPart
from llaisys.text.tool_calls.grammar import CallGrammar
from llaisys.text.tool_calls.scanning import BracketEnd, json_call

GRAMMAR = CallGrammar(before='{"name": "{name}", "parameters": ', after="}", between="; ")

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


class Llama3Parser:
    """Parses calls at the start of a completion; all text from the first non-call on is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not emitted yet
        self._object = BracketEnd()
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
        call = json_call(body[:end], "parameters", self._names)
        if call is None:
            self._is_content = True
            return False
        parts.append(call)
        self._n_calls += 1
        self._text, self._object = body[end:], BracketEnd()
        return True

    def _rest(self) -> list[OutputPart]:
        text, self._text = self._text, ""
        return [Content(text)] if text else []
