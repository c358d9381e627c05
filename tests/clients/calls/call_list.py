"""The list of calls, and what they share: the servers of the arguments, a question and a schema."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The address and the key of SmolLM2, and the address of the scripted server, which has the same key.
SERVER, KEY, SCRIPTED, FOLDER = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])
URL = f"{SERVER}/v1"
MODEL = "smollm2"
QUESTION = "What is the capital of France? One word."
LIGHT = {
    "title": "Light",
    "description": "Turn the light on or off.",
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
WEATHER = {
    "title": "weather",
    "description": "Return the weather of a city.",
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
# What the scripted server responds to (`LIBRARY_SCRIPT` of `run.py`).
WEATHER_QUESTION = "How is the weather in Paris and Rome?"
THINK = "Think about gravity."
# Prices from the package, not from the network; no hints on standard output.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
CALLS: list[tuple[str, str, Callable[[], Any]]] = []


def call(library: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the list."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CALLS.append((library, name, function))
        return function

    return add
