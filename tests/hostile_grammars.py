"""Grammars that try to exhaust time or memory, or to crash the process: `structured_outputs` by name.

Each is refused with a reason, or its cost is bounded.
"""

from __future__ import annotations

import json
from typing import Any


def _properties(n: int, value: Any, name: str = "p{}") -> dict[str, Any]:
    return {name.format(i): value for i in range(n)}


def _chain(n: int, rule: str, last: str) -> str:
    return "".join(rule.format(i, i + 1) for i in range(n)) + last.format(n)


def _refs(n: int) -> str:
    """Return a chain of `$ref`s as text."""
    level = '"{0:x}":{{"properties":{{"a":{{"$ref":"#/$defs/{1:x}"}}}},"required":["a"]}},'
    return '{"$ref":"#/$defs/0","$defs":{' + _chain(n, level, '"{:x}":{{}}') + "}}"


def _nested(n: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {key: [schema, schema]}
    return schema


# Refused, with a reason that contains this text.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "multiple of a large prime": ({"json": {"type": "integer", "multipleOf": 999983}}, "takes more than"),
    "multiples of large primes": (
        {"json": {"allOf": [{"type": "integer", "multipleOf": n} for n in (999983, 99991, 9973)]}},
        "structured_outputs.json",
    ),
    "a schema of itself": ({"json": {"$ref": "#"}}, "no text can complete it"),
    "a schema of itself in itself": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "no text can complete it",
    ),
    "a rule of itself": ({"grammar": "start: start"}, "no text can complete it"),
    "a rule of itself and more": ({"grammar": 'start: start "a"'}, "no text can complete it"),
    "rules of each other": ({"grammar": "start: a\na: b\nb: a"}, "no text can complete it"),
    "a terminal of itself": ({"grammar": "start: A\nA: A"}, "structured_outputs.grammar"),
    "800 optional properties": (
        {"json": json.dumps({"type": "object", "properties": _properties(800, {})})},
        "more than 750 optional properties",
    ),
    # Which limit it reaches first, alternatives or CPU time, depends on the machine.
    "2,000 optional properties": (
        {"json": json.dumps({"type": "object", "properties": _properties(2000, {})})},
        "structured_outputs.json",
    ),
    "800 optional properties behind an array": (
        {"json": {"type": "array", "items": {"type": "object", "properties": _properties(800, {})}}},
        "more than 750 optional properties",
    ),
    "repeated repeats": ({"regex": "(a{1000}){1000}"}, "structured_outputs.regex"),
    "three levels of repeats": ({"regex": "((a{100}){100}){100}"}, "structured_outputs.regex"),
    "a repeat of four billion": ({"regex": "a{4294967295}"}, "structured_outputs.regex"),
    "2,000 wildcards": ({"regex": ".*" * 2000}, "structured_outputs.regex"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "a back reference": ({"regex": r"(a)\1"}, "structured_outputs.regex"),
    "an open group": ({"regex": "(" * 64}, "structured_outputs.regex"),
    "no value": ({"json": {"enum": []}}, "structured_outputs.json"),
    "nothing": ({"json": {"not": {}}}, "structured_outputs.json"),
    "another site": ({"json": {"$ref": "https://example.org/schema"}}, "structured_outputs.json"),
    "a reference to nowhere": ({"json": {"$ref": "#/nowhere"}}, "structured_outputs.json"),
    "a number that is not one": ({"json": {"type": "integer", "minimum": "x"}}, "structured_outputs.json"),
    "a multiple of zero": ({"json": {"type": "integer", "multipleOf": 0}}, "structured_outputs.json"),
    "a length below zero": ({"json": {"type": "string", "minLength": -1}}, "structured_outputs.json"),
    "more at least than at most": (
        {"json": {"type": "integer", "minimum": 2, "maximum": 1}},
        "structured_outputs.json",
    ),
    "a schema that is a list": ({"json": "[1]"}, "structured_outputs.json"),
    "no JSON": ({"json": '{"a":'}, "structured_outputs.json"),
    "unknown rules": ({"grammar": "start: nobody"}, "unknown name"),
    "no start": ({"grammar": 'begin: "a"'}, "no start rule"),
    "text that is no Lark": ({"grammar": "\x01\x02"}, "structured_outputs.grammar"),
    "a file": ({"grammar": '%import /etc/passwd\nstart: "a"'}, "structured_outputs.grammar"),
}
# Refused or not: the compilation ends, and the process survives.
BOUNDED: dict[str, dict[str, Any]] = {
    "repeats within bounds": {"regex": "(a{100}){100}"},
    "an exponential automaton": {"regex": "[ab]*a[ab]{100}c"},
    "long runs of any character": {"regex": "(.{0,50}x){50}"},
    "every letter of Unicode": {"regex": r"(\p{L}\p{M}?){1,500}"},
    "60 KB of alternatives": {"regex": "|".join(f"{i:x}" * 3 for i in range(4000))},
    "nested optional groups": {"regex": "(" * 60 + "a" + "?)*" * 30 + ")" * 30},
    "4,000 choices": {"choice": [f"{i:x}" * 3 for i in range(4000)]},
    "one choice of 60 KB": {"choice": ["ab" * 30_000]},
    "700 optional properties": {"json": {"type": "object", "properties": _properties(700, {})}},
    "950 references in a row": {"json": _refs(950)},
    "2^10 branches": {"json": _nested(10, "anyOf")},
    "branches that all hold": {"json": _nested(8, "allOf")},
    "a very long string": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**6}},
    "a very long array": {"json": {"type": "array", "minItems": 10**6, "items": {"type": "array"}}},
    "a pattern of a pattern": {"json": {"type": "string", "pattern": "((a|b)*c){1,200}", "maxLength": 5000}},
    "numbers of 300 digits": {"json": {"type": "number", "minimum": -1e300, "maximum": 1e300}},
    "single characters by many rules": {
        "grammar": "start: c*\nc: " + " | ".join(f"/[a-{chr(122 - i)}]/" for i in range(20)) + " | /./\n"
    },
    "an ambiguous rule": {"grammar": 'start: e\ne: e e | "a" | "b" | e "a" e\n'},
    "empty rules": {"grammar": "start: a*\na: b*\nb: c*\nc: \n"},
    "2,500 rules": {"grammar": "start: r0\n" + _chain(2500, 'r{}: ("a" [r{}])*\n', 'r{}: "b"')},
    "4,000 terminals": {"grammar": "start: R0\n" + _chain(4000, "R{}: R{}\n", 'R{}: "b"')},
    "a repeated rule": {"grammar": 'start: a{100000}\na: "x" | "y"\n'},
}
ALL: dict[str, dict[str, Any]] = {**{name: given for name, (given, _) in REFUSED.items()}, **BOUNDED}
