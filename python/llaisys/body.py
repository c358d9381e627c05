"""Parses the JSON body of a request, with bounds on depth and size, and validates it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeAlias

from llaisys.errors import RejectedError

if TYPE_CHECKING:
    from pydantic import BaseModel

DEPTH_MAX = 32
# Schemas and tools are deeper; their own bound (64) counts from these fields on.
DEEP_FIELDS = frozenset(
    {
        "tools",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "guided_json",
        "messages",
        "output_config",
        "text",
    }
)
DEEP_DEPTH_MAX = 72
# Maximum lists and objects, which cost most to create: 4 MiB of `[]` are 1.4 million of them and took 0.8 s.
CONTAINERS_MAX = 1 << 16
# Fields with token ids, and the maximum number of ids: one prompt of a million tokens, or several shorter
# ones.
IDS_FIELDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids"})
VALUES_MAX = 1 << 20
# Maximum values of all other fields together: 4 for each list and object.
OTHER_VALUES_MAX = 1 << 18

# The first invalid field of a body: its path, pydantic's error type, the message.
InvalidField: TypeAlias = tuple[tuple[str | int, ...], str, str]


def parse_body(raw: bytes) -> Any:
    """Return the value of a JSON text.

    Raises json.JSONDecodeError, UnicodeDecodeError or RecursionError for invalid JSON, RejectedError for a
    value that is nested too deep or has too many values.
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
                bounds = f"{CONTAINERS_MAX} lists and objects, {VALUES_MAX} ids, {OTHER_VALUES_MAX} others"
                raise RejectedError(f"{name[:64]} makes the body exceed {bounds}", param=name[:64])
            level = [child for each in level for child in _items(each) if isinstance(child, dict | list)]


def read_body(raw: bytes, model: str | None) -> tuple[Any, InvalidField | None]:
    """Return the value of a JSON text, and its first invalid field for this model. One of them is None.

    `model` names a subclass of BaseModel as `module:class`, which is imported. With None, any value is valid.
    Raises the errors of `parse_body`.
    """
    value = json.loads(raw)
    if model is not None:  # before the bounds of the body, because its errors name the bound of a field
        # Here, because the tokenizer's processes start in half of the time without it.
        from pydantic import ValidationError

        module, _, name = model.partition(":")
        body: type[BaseModel] = getattr(importlib.import_module(module), name)
        try:
            body.model_validate(value)
        except ValidationError as e:
            return None, first_invalid_field(
                e.errors(include_url=False, include_context=False, include_input=False)
            )
    _check_bounds(value)
    return value, None


def first_invalid_field(errors: Collection[Any]) -> InvalidField:
    """Return the error to report: an exceeded bound before errors for other types of the same field."""
    error = min(errors, key=lambda each: each["type"] != "too_long")
    return tuple(error["loc"]), error["type"], error["msg"]


def _items(container: dict[str, Any] | list[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container
