"""Reads the forms of a prompt, and prepares a request's prompt and bad words as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from llaisys.errors import RejectedError
from llaisys.sampling_params import SamplingParams
from llaisys.text.tokenizer import Tokenizer
from llaisys.vllm_arguments import refuse

# Text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or token ids.
Prompt: TypeAlias = "str | Mapping[str, Any] | Sequence[int]"


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """Return a list of prompts; a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]
    return prompts


def read_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Return the text and the token ids of a prompt, None for what it does not have; never None for both.

    Raises RejectedError for another form, UnsupportedError naming another key (`multi_modal_data`).
    """
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, _ids(prompt)
    if not ("prompt_token_ids" in prompt or isinstance(prompt.get("prompt"), str)):
        raise RejectedError("a prompt object needs 'prompt' (text) or 'prompt_token_ids'", param="prompts")
    refuse(**{name: value for name, value in prompt.items() if name not in ("prompt", "prompt_token_ids")})
    if "prompt_token_ids" in prompt:
        return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
    return str(prompt["prompt"]), None


def _ids(ids: Sequence[Any]) -> list[int]:
    for each in ids:
        if not isinstance(each, Integral):
            raise RejectedError(f"the prompt has {each!r}, expected token ids", param="prompt_token_ids")
    return [int(each) for each in ids]


def truncate_prompt(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the `truncate_prompt_tokens` ids of a prompt that remain, or all if it is None. Idempotent.

    For -1, return as many as leave space for `max_tokens` (1 if None) in the context of `max_model_len`
    tokens.
    """
    n_kept = params.truncate_prompt_tokens
    if n_kept is None:
        return ids
    if n_kept == -1:
        n_kept = max(1, max_model_len - (params.max_tokens or 1))
    return ids[:n_kept] if params.truncation_side == "right" else ids[-n_kept:]


def tokenize_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the distinct token sequences of each word, with and without a leading space.

    Raises RejectedError for a word that has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not (bare and ids):
                raise RejectedError(
                    "bad_words has an empty word, or one that the tokenizer drops", param="bad_words"
                )
            sequences[ids] = None
    return tuple(sequences)
