"""A request's JSON: parsed, and bounded in what it costs whoever reads it next."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from llaisys.errors import RejectedError

DEPTH_MAX = 32
# Schemas and tools are deeper by nature; their own bound (64) is counted from inside of these fields.
DEEP_FIELDS = frozenset(
    {"tools", "tool_choice", "response_format", "structured_outputs", "guided_json", "messages"}
)
DEEP_DEPTH_MAX = 72
# A list or an object is what is dear to make: 4 MiB of `[]` are 1.4 million of them and took 0.8 s.
CONTAINERS_MAX = 1 << 16
VALUES_MAX = 1 << 20


def parse_body(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises json.JSONDecodeError, UnicodeDecodeError or RecursionError for what is no JSON text, RejectedError
    for one that is nested too deep or has too many values.
    """
    value = json.loads(raw)
    fields = value.items() if isinstance(value, dict) else [("the body", value)]
    n_values = n_containers = 0
    for name, field in fields:
        depth, depth_max = 1, DEEP_DEPTH_MAX if name in DEEP_FIELDS else DEPTH_MAX
        level = [field] if isinstance(field, dict | list) else []
        while level:
            depth += 1
            n_containers += len(level)
            n_values += sum(map(len, level))
            if depth > depth_max:
                raise RejectedError(f"{name[:64]} is nested more than {depth_max} deep", param=name[:64])
            if n_containers > CONTAINERS_MAX or n_values > VALUES_MAX:
                most = f"{CONTAINERS_MAX} lists and objects, {VALUES_MAX} values"
                raise RejectedError(f"{name[:64]} brings the body over {most}", param=name[:64])
            level = [child for each in level for child in _items(each) if isinstance(child, dict | list)]
    return value


def _items(container: dict[str, Any] | list[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container
