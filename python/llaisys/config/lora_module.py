"""LoraModule: a LoRA adapter of `--lora-modules`, in vLLM's forms."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LoraModule:
    """A LoRA adapter that a server loads at startup.

    - `name`: the model name that selects it. `path`: its folder.
    - `base_model_name`: the model that it belongs to (default: the only one).
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    path: Annotated[str, Field(min_length=1)]
    base_model_name: str | None = None


def read_module(value: Any) -> Any:
    """Return the value of a module from `name=path` or a JSON object. Raises ValueError."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as e:
            raise ValueError(f"{text!r} is not JSON: {e}") from None
    name, separator, path = text.partition("=")
    if not separator:
        raise ValueError(f"{text!r} is not an adapter; expected name=path")
    return {"name": name.strip(), "path": path.strip()}
