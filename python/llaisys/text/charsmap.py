"""Bounds SentencePiece's table of replaced characters (`precompiled_charsmap`), which is from a model file.

Layout: the size of a trie (4 bytes, little endian), the trie, then the replacements, each ended by a zero
byte. Source: SentencePiece's `src/normalizer.cc`.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import tokenizers

from llaisys.errors import RejectedError

# The longest replacement in bytes. That of NFKC is 33 (U+FDFA).
REPLACEMENT_MAX = 64


def check_charsmap(charsmap: bytes) -> None:
    """Raise RejectedError for a table that is cut, or that could multiply a text."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    if len(charsmap) <= start:
        raise RejectedError(
            f"precompiled_charsmap has {len(charsmap)} bytes, and a trie of {start - 4}", param="model"
        )
    longest = max(map(len, charsmap[start:].split(b"\0")))
    if longest > REPLACEMENT_MAX:
        raise RejectedError(
            f"precompiled_charsmap replaces a character by {longest} bytes, at most {REPLACEMENT_MAX} are "
            "allowed",
            param="model",
        )


def check_normalizer(backend: tokenizers.Tokenizer) -> None:
    """Raise RejectedError if a table in the normalizers of a tokenizer could multiply a text."""
    if backend.normalizer is not None:
        _check(json.loads(backend.normalizer.__getstate__()))


def _check(state: Any) -> None:
    if state.get("type") == "Precompiled":
        check_charsmap(base64.b64decode(state["precompiled_charsmap"]))
    for inner in state.get("normalizers", ()):
        _check(inner)
