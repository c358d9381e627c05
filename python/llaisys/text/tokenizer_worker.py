"""The jobs of a tokenizer worker process: render templates, tokenize, detokenize and parse bodies."""

from __future__ import annotations

import json
from array import array
from typing import Any

from llaisys.body import read_body
from llaisys.errors import RejectedError
from llaisys.job_process import Jobs
from llaisys.text.chat_template import ChatTemplate, TemplateSource
from llaisys.text.tokenizer import Tokenizer, tokenizer_of_json

# The tokenizer and chat template of each model, by its index.
_MODELS: dict[int, tuple[Tokenizer, ChatTemplate | None]] = {}


def _load(
    model_index: int,
    tokenizer: str,
    texts: dict[str, str] | None,
    special: dict[str, str],
    is_encoder: bool,
) -> None:
    template = None if texts is None else ChatTemplate(TemplateSource(texts, special))
    loaded = tokenizer_of_json(tokenizer, is_encoder=is_encoder)
    loaded.warm_up()
    _MODELS[model_index] = (loaded, template)


def _encode(model_index: int, text: str, add_special_tokens: bool, n_tokens_max: int | None) -> bytes:
    return _packed(_MODELS[model_index][0].encode(text, add_special_tokens, n_tokens_max))


def _pair(model_index: int, first: str, second: str, n_tokens_max: int | None) -> tuple[bytes, int | None]:
    prompt = _MODELS[model_index][0].encode_pair(first, second, n_tokens_max)
    return _packed(prompt.ids), prompt.second_segment


def _chat(
    model_index: int,
    messages: list[Any],
    options: dict[str, Any],
    add_special_tokens: bool,
    n_tokens_max: int | None,
) -> bytes:
    tokenizer, template = _MODELS[model_index]
    assert template is not None
    return _packed(tokenizer.encode(template.render(messages, **options), add_special_tokens, n_tokens_max))


def _decode(model_index: int, packed: bytes, skip_special_tokens: bool) -> str:
    return _MODELS[model_index][0].decode(array("I", packed).tolist(), skip_special_tokens)


def _json(raw: bytes, model: str | None) -> tuple[Any, ...]:
    """Return `("value", value, invalid_field)`; for invalid JSON `("position", n)` or `("invalid",)`."""
    try:
        return ("value", *read_body(raw, model))
    except json.JSONDecodeError as e:
        return ("position", e.pos)
    except RejectedError:
        raise
    except (ValueError, RecursionError):  # not UTF-8, an integer of thousands of digits, deep nesting
        return ("invalid",)


def _packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


JOBS: Jobs = {
    "load": _load,
    "encode": _encode,
    "pair": _pair,
    "decode": _decode,
    "chat": _chat,
    "json": _json,
}
