"""Arguments of vLLM's methods that are accepted only where they have no effect."""

from __future__ import annotations

from typing import Any

from llaisys.errors import UnsupportedError


def refuse(**arguments: Any) -> None:
    """Raise UnsupportedError naming the first argument that is set, that is, neither None nor empty."""
    for name, value in arguments.items():
        if value is not None and value != {} and value != []:
            raise UnsupportedError(f"{name} is not supported: leave it out, or pass None", param=name)
