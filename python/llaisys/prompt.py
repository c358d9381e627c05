"""Prepares a request's prompt and bad words as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.errors import RejectedError
from llaisys.sampling_params import SamplingParams
from llaisys.text.tokenizer import Tokenizer


def truncate_prompt(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the last `truncate_prompt_tokens` ids of a prompt, or all if it is None. Idempotent.

    For -1, return as many as leave space for `max_tokens` (1 if None) in the context of `max_model_len`
    tokens.
    """
    n_kept = params.truncate_prompt_tokens
    if n_kept is None:
        return ids
    if n_kept == -1:
        n_kept = max(1, max_model_len - (params.max_tokens or 1))
    return ids[-n_kept:]


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
