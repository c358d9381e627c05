"""Tool calls in the form of Python, as Llama 3.2 and Llama 4 write them.

The completion is a list of calls, `[name(key="value", other=1), name()]`, in Llama 4 possibly between
`<|python_start|>` and `<|python_end|>`. Source: Meta's prompt format of Llama 3.2 and Llama 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Literal

from llaisys.output_parts import Content, OutputPart, ToolCall
from llaisys.text.tool_calls.grammar import CallGrammar, Schema, json_rule, ordered_rules, property_schemas
from llaisys.text.tool_calls.scanning import BracketEnd, named_call

START, END = "<|python_start|>", "<|python_end|>"

_BEGIN = re.compile(r"\[\s*(?P<name>[\w.-]*)(?P<space>\s*)(?P<rest>.?)", re.DOTALL)
_TOKEN = re.compile(
    r"""\s*(?: (?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
        | (?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)
        | (?P<word>[^\W\d][\w.-]*)
        | (?P<mark>[\[\](){},:=]) )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
# Names of constants in Python and in JSON.
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_DEPTH_MAX = 64


def keyword_rules(name: str, schema: Schema) -> list[str]:
    """Return the rules of keyword arguments in the order of the schema, separated by commas."""
    items, values = [], []
    for i, (key, (value, is_required)) in enumerate(property_schemas(schema).items()):
        items.append((f"{json.dumps(key + '=')} {name}_{i}_value", is_required))
        values.append(json_rule(f"{name}_{i}_value", value))
    return ordered_rules(name, items, '", "') + values


GRAMMAR = CallGrammar(before="{name}(", after=")", between=", ", begin="[", end="]", arguments=keyword_rules)


class PythonicParser:
    """Parses a list of calls at the start of a completion (an OutputParser); any other text is content."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not emitted yet
        self._list = BracketEnd(opens="[{(", quotes="\"'")
        self._state: Literal["begin", "after", "end", "content"] = "begin"  # "end": after END

    def push(self, text: str) -> list[OutputPart]:
        """See OutputParser."""
        self._text += text
        parts: list[OutputPart] = []
        if self._state == "begin":
            parts += self._calls()
        if self._state == "after":
            self._text = self._text.lstrip()
            if self._text.startswith(END):
                self._text, self._state = self._text[len(END) :], "end"
            elif self._text and not END.startswith(self._text):
                self._state = "content"
        if self._state == "end":
            self._text = self._text.lstrip()
            self._state = "content" if self._text else "end"
        return parts + (self._rest() if self._state == "content" else [])

    def finish(self, *, cut: bool = False) -> list[OutputPart]:
        """See OutputParser."""
        is_markup = self._state == "begin" and self._text.strip() and self._may_become_calls(self._body())
        return [] if cut and is_markup else self._rest()

    def _body(self) -> str:
        return self._text.lstrip().removeprefix(START).lstrip()

    def _may_become_calls(self, body: str) -> bool:
        """Return True for a prefix of a list of calls, or of the tag before it."""
        if not body or START.startswith(body):
            return True
        begin = _BEGIN.match(body)
        if begin is None:
            return False
        is_whole = bool(begin["space"] or begin["rest"])
        if is_whole:
            return begin["name"] in self._names and begin["rest"] in ("", "(")
        return any(name.startswith(begin["name"]) for name in self._names)

    def _calls(self) -> list[OutputPart]:
        body = self._body()
        if not self._may_become_calls(body):
            self._state = "content"
            return []
        end = self._list.find(body) if body.startswith("[") else None
        if end is None:
            return []
        calls = parsed_calls(body[:end], self._names)
        if calls is None:
            self._state = "content"
            return []
        self._state, self._text = "after", body[end:]
        return list(calls)

    def _rest(self) -> list[OutputPart]:
        text, self._text = self._text, ""
        return [Content(text)] if text else []


def parsed_calls(text: str, names: Collection[str]) -> list[ToolCall] | None:
    """Return the calls of a list, or None if it has anything else."""
    try:
        return _Reader(text).calls(names)
    except (ValueError, RecursionError):
        return None


class _Reader:
    """Reads a list of calls with literal arguments. Raises ValueError for any other text.

    Python's own parser is not used, because deep nesting can overflow its stack.
    """

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                if text[at:].strip():
                    raise ValueError(f"unexpected text at {at}")
                break
            self._tokens.append((str(token.lastgroup), token[str(token.lastgroup)]))
            at = token.end()
        self._tokens.reverse()

    def calls(self, names: Collection[str]) -> list[ToolCall]:
        """Read the whole text."""
        found = []
        self._expect("[")
        while True:
            kind, name = self._next()
            call = named_call(name if kind == "word" else None, self._arguments(), names)
            if call is None:
                raise ValueError(f"{name} is not a function")
            found.append(call)
            if self._next_mark(",", "]") == "]":
                break
        if self._tokens:
            raise ValueError("text after the list")
        return found

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        self._expect("(")
        while not self._skip(")"):
            kind, key = self._next()
            if kind != "word" or key in arguments:
                raise ValueError(f"{key} is not a keyword")
            self._expect("=")
            arguments[key] = self._value(0)
            if not self._skip(","):
                self._expect(")")
                break
        return arguments

    def _value(self, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError("nested too deep")
        kind, token = self._next()
        match kind:
            case "text":
                return _unescaped(token[1:-1])
            case "number":
                return float(token) if any(c in token for c in ".eE") else int(token)
            case "word" if token in _CONSTANTS:
                return _CONSTANTS[token]
            case "mark" if token == "[":
                return self._list(depth)
            case "mark" if token == "{":
                return self._dict(depth)
        raise ValueError(f"{token} is not a value")

    def _list(self, depth: int) -> list[Any]:
        values: list[Any] = []
        while not self._skip("]"):
            values.append(self._value(depth + 1))
            if not self._skip(","):
                self._expect("]")
                break
        return values

    def _dict(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._skip("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            self._expect(":")
            values[key] = self._value(depth + 1)
            if not self._skip(","):
                self._expect("}")
                break
        return values

    def _next(self) -> tuple[str, str]:
        if not self._tokens:
            raise ValueError("unexpected end")
        return self._tokens.pop()

    def _skip(self, mark: str) -> bool:
        found = bool(self._tokens) and self._tokens[-1] == ("mark", mark)
        if found:
            self._tokens.pop()
        return found

    def _next_mark(self, *marks: str) -> str:
        kind, token = self._next()
        if kind != "mark" or token not in marks:
            raise ValueError(f"{token} in place of {' or '.join(marks)}")
        return token

    def _expect(self, mark: str) -> None:
        self._next_mark(mark)


def _unescaped(text: str) -> str:
    """Return the text of a string literal of Python or JSON; two halves of a surrogate pair are joined."""

    def replace(found: re.Match[str]) -> str:
        escape = found[1]
        if escape[0] in "uUx" and len(escape) > 1:
            code = int(escape[1:], 16)
            if code > 0x10FFFF:
                raise ValueError("not a character")
            return chr(code)
        return _ESCAPES.get(escape, escape)

    made = _ESCAPE.sub(replace, text)
    return made.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
