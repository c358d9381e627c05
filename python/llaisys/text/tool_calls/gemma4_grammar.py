"""The grammar of Gemma 4's tool calls: rules for arguments in a form that is not JSON.

The keys of an object are in the order in which the chat template shows them. Of a string, `enum`, `const`,
`minLength` and `maxLength` are enforced; `pattern` and `format` are not. An object with `properties` has no
others. A schema that these rules cannot express (`allOf` of several, `prefixItems`) allows any value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llaisys.text.tool_calls.gemma4 import CLOSE, OPEN, QUOTE, is_plain_key
from llaisys.text.tool_calls.grammar import CallGrammar, Schema, json_rule, ordered_rules, property_schemas

_DEPTH_MAX = 32
_NUMBER_FIELDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Fields that imply a type.
_IMPLIED_TYPES = {"properties": "object", "additionalProperties": "object", "items": "array"}
_ANY_KEY = r'/[^\[\]{},:<>"\s]+/'


def call_grammar(quote_id: int | None) -> CallGrammar:
    """Return the grammar of calls. `quote_id`: id of the tag around strings if it is a single token."""

    def arguments(name: str, schema: Schema) -> list[str]:
        rules = _Rules(name, schema, quote_id)
        return [f"{name}: {rules.object_of(schema, 0)}", *rules.lines]

    return CallGrammar(before=f"{OPEN}call:{{name}}", after=CLOSE, between="", arguments=arguments)


class _Rules:
    """Makes the rules of one call's arguments.

    Its methods return an expression, and append the rules that it uses to `lines`. `root`: the schema that
    references are resolved in.
    """

    def __init__(self, name: str, root: Schema, quote_id: int | None) -> None:
        self.lines: list[str] = []
        self._name = name
        self._root = root
        self._quote_id = quote_id
        self._quote = _literal(QUOTE) if quote_id is None else f"<[{quote_id}]>"
        self._n_rules = 0
        self._named: dict[str, str] = {}  # what a rule is for -> its name

    def value(self, schema: Any, depth: int) -> str:
        """Return the expression of a value."""
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return self._any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference, depth)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list) and choices:
            return _one_of([self._written(choice) for choice in choices])
        types = schema.get("type")
        if types is None:
            return self._untyped(schema, depth)
        return _one_of([self._typed(each, schema, depth) for each in _as_list(types)])

    def object_of(self, schema: Schema, depth: int) -> str:
        """Return the expression of an object."""
        properties = property_schemas(schema)
        if not properties:
            others = schema.get("additionalProperties", "properties" not in schema)
            return '"{" "}"' if others is False else self._mapping(self.value(others, depth + 1))
        name = self._new_name()
        items = []
        for key in sorted(properties, key=str.lower):
            value, is_required = properties[key]
            items.append((f"{self._key(key)} {self.value(value, depth + 1)}", is_required))
        self.lines += ordered_rules(name, items, '","')
        return f'"{{" {name} "}}"'

    def _untyped(self, schema: Schema, depth: int) -> str:
        for key in ("anyOf", "oneOf", "allOf"):
            options = schema.get(key)
            if isinstance(options, list) and options and (key != "allOf" or len(options) == 1):
                return _one_of([self.value(option, depth + 1) for option in options])
        kind = next((kind for key, kind in _IMPLIED_TYPES.items() if key in schema), None)
        return self._typed(kind, schema, depth)

    def _typed(self, kind: object, schema: Schema, depth: int) -> str:
        match kind:
            case "string":
                return self._string(_count(schema, "minLength") or 0, _count(schema, "maxLength"))
            case "integer" | "number":
                limits = {field: schema[field] for field in _NUMBER_FIELDS if field in schema}
                return self._json({"type": kind, **limits})
            case "boolean" | "null":
                return self._json({"type": kind})
            case "array":
                return self._array(schema, depth)
            case "object":
                return self.object_of(schema, depth)
        return self._any()

    def _array(self, schema: Schema, depth: int) -> str:
        item = self.value(None if "prefixItems" in schema else schema.get("items"), depth + 1)
        n_min, n_max = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if n_max == 0:
            return '"[" "]"'
        n_more = f"{max(n_min - 1, 0)},{'' if n_max is None else n_max - 1}"
        return f'"[" ({item} ("," {item}){{{n_more}}}){"" if n_min else "?"} "]"'

    def _mapping(self, value: str) -> str:
        """Return an object with any keys."""
        key = self._rule("key", lambda name: [f"{name}: {_ANY_KEY}"])
        return f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'

    def _string(self, n_min: int, n_max: int | None) -> str:
        """Return a string: any text without the tag that ends it."""
        count = "*" if n_min == 0 and n_max is None else f"{{{n_min},{'' if n_max is None else n_max}}}"
        text = f"(?s:.{count})"

        def rules(name: str) -> list[str]:
            if self._quote_id is None:
                return [f"{name}[suffix={self._quote}]: /{text}/"]
            # Only the token ends the text, but the parser would take the same characters for it.
            other = f"~/(?s:.*){re.escape(QUOTE)}(?s:.*)/"
            return [f"{name}: {name.upper()} {self._quote}", f"{name.upper()}: /{text}/ & {other}"]

        return f"{self._quote} {self._rule(f'string {count}', rules)}"

    def _json(self, schema: Schema) -> str:
        return self._rule(f"json {json.dumps(schema)}", lambda name: [json_rule(name, schema)])

    def _any(self) -> str:
        """Return any value."""

        def rules(name: str) -> list[str]:
            scalar = self._json({"type": ["number", "boolean", "null"]})
            options = [self._string(0, None), scalar, f'"[" ({name} ("," {name})*)? "]"', self._mapping(name)]
            return [f"{name}: {' | '.join(options)}"]

        return self._rule("any", rules)

    def _reference(self, reference: str, depth: int) -> str:
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference)
        group = self._root.get(found[1]) if found else None
        if found is None or not isinstance(group, Mapping) or found[2] not in group:
            return self._any()
        schema = group[found[2]]
        return self._rule(reference, lambda name: [f"{name}: {self.value(schema, depth + 1)}"])

    def _written(self, value: Any) -> str:
        """Return the expression of one value."""
        match value:
            case str():
                return f"{self._quote} {_literal(value)} {self._quote}"
            case Mapping():
                items = [
                    f"{self._key(key)} {self._written(value[key])}" for key in sorted(value, key=str.lower)
                ]
                return " ".join(['"{"', ' "," '.join(items), '"}"'])
            case list():
                return " ".join(['"["', ' "," '.join(map(self._written, value)), '"]"'])
        return _literal(json.dumps(value))

    def _key(self, key: str) -> str:
        return (
            _literal(f"{key}:") if is_plain_key(key) else f'{self._quote} {_literal(key)} {self._quote} ":"'
        )

    def _rule(self, purpose: str, rules: Callable[[str], list[str]]) -> str:
        """Return the name of the rule for a purpose, and add it on first use. A rule may use itself."""
        if purpose not in self._named:
            self._named[purpose] = self._new_name()
            self.lines += rules(self._named[purpose])
        return self._named[purpose]

    def _new_name(self) -> str:
        self._n_rules += 1
        return f"{self._name}_{self._n_rules}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _one_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _as_list(types: Any) -> list[Any]:
    return types if isinstance(types, list) and types else [types]


def _count(schema: Schema, field: str) -> int | None:
    """Return a length in a schema; None if it has none."""
    n = schema.get(field)
    return n if isinstance(n, int) and n >= 0 else None
