"""Grammars that are expensive or invalid (`tests/hostile_grammars.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attack.sockets import opened
from attack.target import Group, Reply, Target
from hostile_grammars import BOUNDED, REFUSED

GROUP = Group("grammars")
CHAT = "/v1/chat/completions"


def body(grammar: dict[str, Any]) -> dict[str, Any]:
    """Return a chat request with a grammar."""
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "structured_outputs": grammar}


def _post(name: str, grammar: dict[str, Any], *allowed: int | None) -> None:
    GROUP.one(name, lambda target: target.post(CHAT, body(grammar)), *allowed)


for name, (grammar, _) in REFUSED.items():
    _post(name.replace(" ", "_"), grammar, 400)
for name, grammar in BOUNDED.items():
    _post(name.replace(" ", "_"), grammar, 200, 400)


@GROUP.case(200, is_long=True)
def six_grammars_that_take_long_to_compile(target: Target) -> Iterator[Reply]:
    """Meanwhile a grammar and `/detokenize` of another client get responses."""
    raws = [
        target.request(
            "POST", CHAT, json.dumps(body({"json": {"type": "integer", "multipleOf": n}})).encode()
        )
        for n in (999983, 999979, 999961, 999959, 999953, 999931)
    ]
    with opened(target, raws):
        yield target.post(CHAT, body({"json": {"type": "boolean"}}), key=target.other_key)
        yield target.post("/detokenize", {"tokens": [1, 2, 3]}, key=target.other_key)


@GROUP.case(200, is_long=True)
def sixty_rows_of_expensive_masks(target: Target) -> Iterator[Reply]:
    raw = target.request("POST", CHAT, json.dumps(body({"regex": "(a{100}){100}"})).encode())
    with opened(target, [raw] * 60):
        for _ in range(5):
            yield target.post("/v1/completions", {"prompt": "a", "max_tokens": 8}, key=target.other_key)
