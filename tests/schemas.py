"""JSON schemas generated from a seed. Everything in them is bounded, so a completion can end."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "tags", "size", "kind", "price", "ok", "code", "note")


def schema(seed: int) -> dict[str, Any]:
    """Return an object schema with one to four properties and up to two levels."""
    return _object(random.Random(seed), depth=2)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(1, 4 if depth == 2 else 2))
    return {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": names if draw.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _whole, _number, _enum, _flag, _pattern]
    if depth > 0:
        kinds += [_array, lambda draw: _object(draw, depth)]
    return draw.choice(kinds)(draw)


def _text(draw: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 12)}


def _whole(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(1, 500)}


def _number(draw: random.Random) -> dict[str, Any]:
    """Return a number type. Steps are binary fractions, so that the validator's division is exact."""
    steps: dict[str, Any] = {"multipleOf": 0.25} if draw.random() < 0.5 else {}
    return {"type": "number", "minimum": 0, "maximum": draw.randint(1, 100), **steps}


def _enum(draw: random.Random) -> dict[str, Any]:
    return {"enum": draw.sample(["red", "green", "blue", 'a "b"', "é😀", 7, None, True], draw.randint(1, 4))}


def _flag(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _pattern(draw: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": draw.choice([r"^[A-Z]{2}\d{3}$", r"^\d{4}-\d{2}$", r"^(yes|no)$"])}


def _array(draw: random.Random) -> dict[str, Any]:
    return {"type": "array", "items": _value(draw, 0), "minItems": draw.randint(0, 1), "maxItems": 3}
