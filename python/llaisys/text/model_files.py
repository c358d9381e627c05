"""Reads small text files of a model folder. The files are untrusted, so every read is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llaisys.errors import RejectedError
from llaisys.files import open_regular

CONFIG_BYTES_MAX = 8 << 20

# transformers' names of the special tokens that templates may use.
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_text(path: Path, bytes_max: int = CONFIG_BYTES_MAX) -> str:
    """Return the UTF-8 text of a file of at most `bytes_max` bytes. Raises RejectedError naming the file."""
    try:
        n_bytes = path.stat().st_size
        if n_bytes > bytes_max:
            raise RejectedError(
                f"{path.name} has {n_bytes} bytes, at most {bytes_max} are read", param="model"
            )
        with open_regular(path) as file:
            return file.read(bytes_max).decode("utf-8")
    except UnicodeDecodeError as e:
        raise RejectedError(f"{path.name} is not UTF-8 (byte {e.start})", param="model") from e
    except OSError as e:
        raise RejectedError(f"cannot read {path}: {e.strerror}", param="model") from e


def read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or `{}` if there is no such file. Raises RejectedError naming the file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as e:  # ValueError: invalid JSON, or a number of thousands of digits
        if isinstance(e, RejectedError):
            raise
        raise RejectedError(f"{path.name} is not valid JSON: {e}", param="model") from e
    if not isinstance(value, dict):
        raise RejectedError(f"{path.name} is a {type(value).__name__}, expected an object", param="model")
    return value


def special_strings(folder: Path) -> dict[str, str]:
    """Return the special tokens that a folder names, such as `bos_token` -> `<s>`."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_object(folder / name).items():
            if key in SPECIAL_TOKEN_NAMES:
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[key] = text
    return found
