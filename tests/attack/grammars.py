"""Grammars that are dear to compile, dear to follow, or no grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attack.target import Group, Reply, Target

GROUP = Group("grammars")
CHAT = "/v1/chat/completions"


def body(**grammar: Any) -> dict[str, Any]:
    """A chat whose completion keeps a grammar."""
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "structured_outputs": grammar}
