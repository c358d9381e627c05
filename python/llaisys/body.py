"""A request's JSON body: parsed, bounded in depth and size, and validated."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError

from llaisys.errors import RejectedError

DEPTH_MAX = 32
# Schemas and tools are deeper; their own bound (64) is counted from within these fields.
DEEP_FIELDS = frozenset(
    {"tools", "tool_choice", "response_format", "structured_outputs", "guided_json", "messages"}
)
DEEP_DEPTH_MAX = 72
# Lists and objects cost most to create: 4 MiB of `[]` are 1.4 million of them and took 0.8 s.
CONTAINERS_MAX = 1 << 16
# Fields that hold token ids: one prompt of the longest context there is (a million), or several shorter.
IDS_FIELDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids"})
VALUES_MAX = 1 << 20
# Of all other fields together: 4 for each list and object.
OTHER_VALUES_MAX = 1 << 18

# The first error of a body: its path, pydantic's type of the error, its message.
Flaw: TypeAlias = tuple[tuple[str | int, ...], str, str]


def parse_body(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises json.JSONDecodeError, UnicodeDecodeError or RecursionError for what is no JSON text, RejectedError
    for one that is nested too deep or has too many values.
    """
    value = json.loads(raw)
    _check_bounds(value)
    return value


def _check_bounds(value: Any) -> None:
    fields = value.items() if isinstance(value, dict) else [("the body", value)]
    n_containers = n_ids = n_others = 0
    for name, field in fields:
        depth, depth_max = 1, DEEP_DEPTH_MAX if name in DEEP_FIELDS else DEPTH_MAX
        level = [field] if isinstance(field, dict | list) else []
        while level:
            depth += 1
            n_containers += len(level)
            n_values = sum(map(len, level))
            if name in IDS_FIELDS:
                n_ids += n_values
            else:
                n_others += n_values
            if depth > depth_max:
                raise RejectedError(f"{name[:64]} is nested more than {depth_max} deep", param=name[:64])
            if n_containers > CONTAINERS_MAX or n_ids > VALUES_MAX or n_others > OTHER_VALUES_MAX:
                most = f"{CONTAINERS_MAX} lists and objects, {VALUES_MAX} ids, {OTHER_VALUES_MAX} others"
                raise RejectedError(f"{name[:64]} brings the body over {most}", param=name[:64])
            level = [child for each in level for child in _items(each) if isinstance(child, dict | list)]


def read_body(raw: bytes, model: str | None) -> tuple[Any, Flaw | None]:
    """The value of a JSON text, and what is wrong with it as a body of this model; one of both is None.

    `model`: a subclass of BaseModel as `module:class`, which is imported; None: any value is right.
    Raises as `parse_body`.
    """
    value = json.loads(raw)
    if model is not None:  # first, because it names the bound of the field
        module, _, name = model.partition(":")
        body: type[BaseModel] = getattr(importlib.import_module(module), name)
        try:
            body.model_validate(value)
        except ValidationError as e:
            return None, first_flaw(e.errors(include_url=False, include_context=False, include_input=False))
    _check_bounds(value)
    return value, None


def first_flaw(errors: Collection[Any]) -> Flaw:
    """The one to report: an exceeded bound goes before the other types that the field might have had."""
    error = min(errors, key=lambda each: each["type"] != "too_long")
    return tuple(error["loc"]), error["type"], error["msg"]


def _items(container: dict[str, Any] | list[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container
