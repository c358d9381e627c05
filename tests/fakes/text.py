"""A tokenizer and a chat template for the fake core: one token per byte, and three special tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from fakes import core
from llaisys.engine.worker import inspect_model
from llaisys.model_assets import ModelAssets
from llaisys.text.chat_template import ChatTemplate, TemplateSource
from llaisys.text.tokenizer import Tokenizer

EOS, EOT, START = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def tokenizer() -> Tokenizer:
    """Return a tokenizer: ids 0..255 are bytes in byte-level order, 256..258 are special, others words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<eos>", "<eot>", "<start>")])
    backend.add_tokens([AddedToken(f"word{i}") for i in range(core.VOCAB_SIZE - 259)])
    return Tokenizer(backend)


def model(**changes: Any) -> ModelAssets:
    """Return the assets of the model; `llaisys._core` must be the fake."""
    facts: dict[str, Any] = {
        "name": "fake",
        "info": inspect_model(Path("fake")),
        "tokenizer": tokenizer(),
        "template": ChatTemplate(TemplateSource({"default": TEMPLATE}, {})),
        "sampling_defaults": {"temperature": 0.0},
    }
    return ModelAssets(**{**facts, **changes})
