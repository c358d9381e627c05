"""CallGrammar: a Lark grammar that enforces tool calls in a format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llaisys.sampling_params import JSON_STYLE

# Maximum calls in one completion under a grammar, so that a model that repeats itself ends.
CALLS_MAX = 16

Schema: TypeAlias = Mapping[str, Any]
# (name of the rule, schema of the arguments) -> the lines of the rule.
ArgumentRules: TypeAlias = Callable[[str, Schema], list[str]]


def json_rule(name: str, schema: Schema) -> str:
    """Return a rule for a JSON value of a schema."""
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': dict(JSON_STYLE)})}"


def _json_object(name: str, schema: Schema) -> list[str]:
    return [json_rule(name, {**schema, "type": "object"})]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The text around the arguments of calls.

    - `before`, `after`: around the arguments of a call. `{name}` in `before` is the function.
    - `between`: between two calls. `begin`, `end`: around all calls.
    - `arguments`: makes the rules of the arguments.
    """

    before: str
    after: str
    between: str
    begin: str = ""
    end: str = ""
    arguments: ArgumentRules = _json_object

    def lark(
        self, tools: Mapping[str, Schema], *, parallel: bool, special_ids: Mapping[str, int] | None = None
    ) -> str:
        """Return the grammar of one call, or with `parallel` of 1 to 16 calls.

        `tools`: name -> JSON schema of the arguments, which are an object. `special_ids`: ids of tags that
        are single tokens, which a grammar of text cannot produce.
        """

        def terminals(text: str) -> str:
            return _terminals(text, special_ids or {})

        more = f" ({terminals(self.between)} call){{0,{CALLS_MAX - 1}}}" if parallel else ""
        lines = [
            f"start: {terminals(self.begin)} call{more} {terminals(self.end)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
        ]
        for i, (name, schema) in enumerate(tools.items()):
            head = self.before.replace("{name}", name)
            lines.append(f"call_{i}: {terminals(head)} arguments_{i} {terminals(self.after)}")
            lines += self.arguments(f"arguments_{i}", schema)
        return "\n".join(lines) + "\n"


def _terminals(text: str, special_ids: Mapping[str, int]) -> str:
    """Return the terminals of a text: strings, and the ids of special tokens."""
    pattern = "|".join(map(re.escape, special_ids)) or "(?!)"
    found, at = [], 0
    for tag in re.finditer(pattern, text):
        found += [text[at : tag.start()], special_ids[tag[0]]]
        at = tag.end()
    found.append(text[at:])
    return " ".join(
        f"<[{each}]>" if isinstance(each, int) else json.dumps(each, ensure_ascii=False)
        for each in found
        if each != ""
    )


def ordered_rules(name: str, items: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Return the rules of items in order, with an expression between those that are present.

    `items`: (expression, is required). `<name>_<i>`: the items from the i-th on, if none precedes;
    `<name>_<i>_more`: after another one.
    """
    lines = [f"{name}: {name}_0"]
    for i, (item, is_required) in enumerate(items):
        after = f"{name}_{i + 1}_more"
        first, more = f"{item} {after}", f"{separator} {item} {after}"
        if not is_required:
            first, more = f"{first} | {name}_{i + 1}", f"{more} | {after}"
        lines += [f"{name}_{i}: {first}", f"{name}_{i}_more: {more}"]
    last = len(items)
    return [*lines, f'{name}_{last}: ""', f'{name}_{last}_more: ""']


def property_schemas(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """Return name -> (schema, is required) of an object's properties, each with the object's definitions."""
    properties, required = schema.get("properties"), schema.get("required")
    required = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    named = dict(properties) if isinstance(properties, Mapping) else {}
    named |= {name: {} for name in required if name not in named}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        name: ({**shared, **(each if isinstance(each, Mapping) else {})}, name in required)
        for name, each in named.items()
    }
