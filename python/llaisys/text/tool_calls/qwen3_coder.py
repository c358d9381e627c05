"""Qwen3-Coder's tool calls, which Qwen 3.5 uses, too.

`<tool_call>`, `<function=name>`, for each argument `<parameter=key>`, a line feed, the value, a line feed and
`</parameter>`, then `</function>` and `</tool_call>`. A string is plain text, other values are JSON. Models
leave out `<tool_call>` at times. Source: the chat template of Qwen3-Coder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from llaisys.output_parts import ToolCall
from llaisys.text.tool_calls.grammar import CallGrammar, Schema, json_rule, property_schemas
from llaisys.text.tool_calls.scanning import Scan, TagParser, json_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER, PARAMETER_CLOSE = "<parameter=", "</parameter>"

_NAME_CHARS_MAX = 128
_PYTHON_LITERALS = {"True": True, "False": False, "None": None}
_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_DEPTH_MAX = 8


def _rules(name: str, schema: Schema) -> list[str]:
    """Return the rules of parameters in the order of the schema."""
    parameters = property_schemas(schema)
    lines = [f"{name}: " + (" ".join(f"{name}_{i}" for i in range(len(parameters))) or '""')]
    for i, (key, (value, is_required)) in enumerate(parameters.items()):
        head, optional = json.dumps(f"{PARAMETER}{key}>\n"), "" if is_required else "?"
        lines.append(f"{name}_{i}: ({head} {name}_{i}_value){optional}")
        lines += _value(f"{name}_{i}_value", value)
    return lines


def _value(name: str, schema: Schema) -> list[str]:
    """Return the rules of a value and the tag that ends it. A string may have any text without that tag."""
    tail = json.dumps(f"\n{PARAMETER_CLOSE}\n")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        options = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        return [f"{name}: ({options}) {tail}"]
    types = _types(schema, schema)
    if not types or "string" in types:
        return [f"{name}[suffix={tail}]: /(?s:.*)/"]
    return [f"{name}: {name}_json {tail}", json_rule(f"{name}_json", schema)]


GRAMMAR = CallGrammar(
    before=f"{OPEN}\n{FUNCTION}{{name}}>\n",
    after=f"{FUNCTION_CLOSE}\n{CLOSE}",
    between="\n",
    arguments=_rules,
)


def parser(tools: Mapping[str, Schema]) -> TagParser:
    """Return a parser of one completion. `tools`: name -> JSON schema of the arguments."""
    return TagParser([OPEN, FUNCTION], lambda: _Call(tools))


class _Call:
    """A CallScanner. At the end of a completion, a call without its closing `</tool_call>` counts."""

    def __init__(self, tools: Mapping[str, Schema]) -> None:
        self._tools = tools
        self._name = ""
        self._values: dict[str, Any] = {}
        self._at = 0  # the text before was scanned
        self._search = 0  # no end of the open value before

    def scan(self, text: str, *, is_end: bool) -> Scan | None:
        """See CallScanner."""
        if not self._name:
            scan = self._function(text)
            if not self._name:
                return scan
        while text.startswith(PARAMETER, self._skip_space(text)):
            if not self._parameter(text, is_end=is_end):
                return None
        rest = text[self._at :]
        if not rest.startswith(FUNCTION_CLOSE):
            is_open = not rest or FUNCTION_CLOSE.startswith(rest) or PARAMETER.startswith(rest)
            return None if is_open else Scan(self._at)
        after = rest[len(FUNCTION_CLOSE) :]
        if text.startswith(OPEN):
            after = after.lstrip()
            if not after.startswith(CLOSE):
                if not CLOSE.startswith(after):
                    return self._found(len(text) - len(after))
                if not is_end:
                    return None
            after = after[len(CLOSE) :]
        return self._found(len(text) - len(after))

    def _found(self, n: int) -> Scan:
        return Scan(n, (ToolCall(self._name, json.dumps(self._values, ensure_ascii=False)),))

    def _function(self, text: str) -> Scan | None:
        """Scan up to the name of the function, and set it."""
        tag = OPEN if text.startswith(OPEN) else FUNCTION
        head = text if tag == FUNCTION else text[len(OPEN) :].lstrip()
        if not head.startswith(FUNCTION):
            return None if FUNCTION.startswith(head) else Scan(len(tag))
        name, is_closed, _ = head[len(FUNCTION) :].partition(">")
        if not is_closed:
            return None if len(name) <= _NAME_CHARS_MAX else Scan(len(tag))
        if name.strip() not in self._tools:
            return Scan(len(tag))
        self._name = name.strip()
        self._at = self._search = len(text) - len(head) + len(FUNCTION) + len(name) + 1
        return None

    def _skip_space(self, text: str) -> int:
        while self._at < len(text) and text[self._at].isspace():
            self._at += 1
        return self._at

    def _parameter(self, text: str, *, is_end: bool) -> bool:
        """Scan an argument; return False if that needs more text.

        A value may contain `</parameter>`: the tag that ends it precedes another argument or the end of the
        call.
        """
        key_end = text.find(">", self._at)
        if key_end < 0:
            return False
        end = text.find(PARAMETER_CLOSE, max(self._search, key_end + 1))
        while end >= 0:
            rest = text[end + len(PARAMETER_CLOSE) : end + 256].lstrip()
            if rest.startswith((PARAMETER, FUNCTION_CLOSE)):
                break
            if not is_end and (not rest or any(tag.startswith(rest) for tag in (PARAMETER, FUNCTION_CLOSE))):
                self._search = end
                return False
            end = text.find(PARAMETER_CLOSE, end + 1)
        if end < 0:
            self._search = max(key_end + 1, len(text) - len(PARAMETER_CLOSE) + 1)
            return False
        key = text[self._at + len(PARAMETER) : key_end].strip()
        value = text[key_end + 1 : end].removeprefix("\n").removesuffix("\n")
        self._values[key] = _converted(value, key, self._tools[self._name])
        self._at = self._search = end + len(PARAMETER_CLOSE)
        return True


def _converted(text: str, key: str, schema: Schema) -> Any:
    """Return the value of an argument in a type of its schema, or the text."""
    value, _ = property_schemas(schema).get(key, ({}, False))
    types = _types(value, value)
    if not types or types == {"string"}:
        return text
    stripped = text.strip()
    try:
        found = _PYTHON_LITERALS[stripped] if stripped in _PYTHON_LITERALS else json_value(stripped)
    except (ValueError, RecursionError):
        return text
    return found if types.intersection(_TYPES[type(found)]) and not isinstance(found, str) else text


def _types(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference)
        named = root.get(found[1]) if found else None
        return _types(named.get(found[2]), root, depth + 1) if found and isinstance(named, Mapping) else set()
    stated = schema.get("type")
    types = {each for each in (stated if isinstance(stated, list) else [stated]) if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types |= _types(option, root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if not types and isinstance(values, list):
        types = {name for value in values for name in _TYPES.get(type(value), ())}
    return types
