"""Reads from a checkpoint how embeddings are pooled and whether they are normalized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo
from llaisys.text.model_files import read_object, read_text

# For a model that names no pooling type: a decoder, as in vLLM, and an encoder, as in Sentence Transformers.
DEFAULT, ENCODER_DEFAULT = "last", "mean"
# llama.cpp's `enum llama_pooling_type`.
_GGUF = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# Sentence Transformers' names of the supported pooling types, and the supported modules.
_MODES = {
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
    "cls_token": "cls",
    "cls": "cls",
    "max_tokens": "max",
    "max": "max",
}
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
# The width of the hidden states, in the spelling of published files and in the newest.
_SIZES = ("word_embedding_dimension", "embedding_dimension")


def model_pooling(info: ModelInfo) -> str:
    """Return `mean`, `last`, `cls` or `max`, or the name of the unsupported pooling type or module that the
    model needs.

    A GGUF has it in `<architecture>.pooling_type`, a folder of Sentence Transformers in `modules.json` and
    `1_Pooling/config.json`. Raises RejectedError for files that cannot be read, or that are of another width.
    """
    if info.pooling_type is not None:
        return _GGUF.get(info.pooling_type, f"pooling_type {info.pooling_type}")
    folder = Path(info.path)
    if not folder.is_dir():
        return ENCODER_DEFAULT if info.is_encoder else DEFAULT
    for kind in _modules(folder / "modules.json"):
        if kind not in _MODULES:
            return kind
    stated = read_object(folder / "1_Pooling" / "config.json")
    for key in _SIZES:
        if stated.get(key) not in (None, info.d_model):
            raise RejectedError(
                f"1_Pooling/config.json: {key} is {str(stated[key])[:40]}, but the model has {info.d_model}",
                param="model",
            )
    modes = [
        name[13:] for name, value in stated.items() if name.startswith("pooling_mode_") and value is True
    ]
    if isinstance(stated.get("pooling_mode"), str):
        modes.append(stated["pooling_mode"])
    kinds = sorted({_MODES.get(mode, mode) for mode in modes})
    return " and ".join(kinds) or (ENCODER_DEFAULT if info.is_encoder else DEFAULT)


def model_normalizes(info: ModelInfo) -> bool:
    """Return whether embeddings have L2 norm 1: unless `modules.json` lists a pooling without Normalize.

    For a score head, return whether its output becomes a number from 0 to 1. Raises UnsupportedError naming
    another activation.
    """
    folder = Path(info.path)
    if info.has_score_head:
        return not folder.is_dir() or _is_sigmoid(read_object(folder / "config.json"))
    kinds = _modules(folder / "modules.json") if folder.is_dir() else []
    return "Pooling" not in kinds or "Normalize" in kinds


def _is_sigmoid(config: dict[str, Any]) -> bool:
    """Return False if Sentence Transformers' activation of a score is the identity, not a sigmoid."""
    stated = config.get("sentence_transformers")
    name = stated.get("activation_fn") if isinstance(stated, dict) else None
    name = str(name or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise UnsupportedError(
            f"the activation of scores {name[:80]!r} is not supported; supported are Sigmoid and Identity",
            param="model",
        )
    return name == "Sigmoid"


def _modules(path: Path) -> list[str]:
    """Return the class names of the modules in order, without their packages."""
    if not path.exists():
        return []
    try:
        modules: Any = json.loads(read_text(path))
        return [str(module["type"]).rpartition(".")[2] for module in modules]
    except RejectedError:
        raise
    except (ValueError, RecursionError, TypeError, KeyError) as e:
        raise RejectedError(f"{path.name} is not a list of modules with a type: {e}", param="model") from e
