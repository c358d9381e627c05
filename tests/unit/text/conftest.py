"""Tokenizers and model metadata for the tests of `llaisys.text`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from llaisys.model_info import GgufTokenizer, ModelInfo
from llaisys.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[2] / "data"


def info_of(path: Path, tokenizer: GgufTokenizer | None = None) -> ModelInfo:
    """Return metadata of a checkpoint; only the fields for text matter."""
    return ModelInfo(
        path=str(path),
        file_format="safetensors" if tokenizer is None else "gguf",
        architecture="qwen2",
        dtype="float32",
        n_layers=1,
        d_model=1,
        n_heads=1,
        n_kv_heads=1,
        d_head=1,
        d_ff=1,
        vocab_size=1,
        max_position_embeddings=1,
        n_parameters=1,
        weight_bytes=1,
        packed_bytes={"auto": 1},
        screen_bytes={"auto": 0},
        kv_bytes_per_cell={},
        bos_token_id=None,
        eos_token_ids=[],
        generation={},
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="session")
def info() -> Callable[..., ModelInfo]:
    """Return the function `info(path, gguf_tokenizer=None)`."""
    return info_of


@pytest.fixture(scope="session")
def qwen_folder() -> Path:
    """Return a folder with the real Qwen2 tokenizer and the Qwen2.5 chat template."""
    return DATA / "qwen2-tokenizer"


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> Tokenizer:
    return load_tokenizer(info_of(qwen_folder))


@pytest.fixture(scope="session")
def qwen_gguf(qwen_folder: Path) -> GgufTokenizer:
    """Return the same tokenizer as GGUF metadata."""
    stated = json.loads((qwen_folder / "tokenizer.json").read_text("utf-8"))
    by_id: dict[int, str] = {id: token for token, id in stated["model"]["vocab"].items()}
    controls = {entry["id"]: entry["content"] for entry in stated["added_tokens"]}
    by_id.update(controls)
    ids = range(len(by_id))
    return GgufTokenizer(
        model="gpt2",
        pre="qwen2",
        tokens=[by_id[id] for id in ids],
        token_types=[3 if id in controls else 1 for id in ids],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in stated["model"]["merges"]],
        add_bos=False,
        bos=None,
        eos=151645,
        unk=None,
        chat_template="{{ messages[0]['content'] }}{{ eos_token }}",
    )


def small_gguf(**changes: Any) -> GgufTokenizer:
    """Return metadata: 256 bytes, `ab` (256), `abc` (257), a control (258) and a user-defined token (259)."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += ["ab", "abc", "<|end|>", "<tool>"]
    stated: dict[str, Any] = {
        "model": "gpt2",
        "pre": "default",
        "tokens": tokens,
        "token_types": [1] * 258 + [3, 4],
        "merges": ["a b", "ab c"],
        "add_bos": False,
        "bos": 258,
        "eos": 258,
        "unk": None,
        "chat_template": None,
    }
    return GgufTokenizer(**(stated | changes))


@pytest.fixture(scope="session")
def small() -> Callable[..., GgufTokenizer]:
    """Return the function `small(**changes)`: metadata of a tiny GGUF tokenizer."""
    return small_gguf


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """Return the tokenizer of `small()`."""
    return load_tokenizer(info_of(Path("tiny.gguf"), small_gguf()))
