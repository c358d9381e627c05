"""What of a request's prompt and words goes to the engine, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.errors import RejectedError
from llaisys.text.tokenizer import Tokenizer
from llaisys.types import SamplingParams


def truncated(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The last `truncate_prompt_tokens` ids; for -1, as many as leave room for `max_tokens` (1 if absent).

    Doing it twice changes nothing.
    """
    n_kept = params.truncate_prompt_tokens
    if n_kept is None:
        return ids
    if n_kept == -1:
        n_kept = max(1, max_model_len - (params.max_tokens or 1))
    return ids[-n_kept:]


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word, as it stands and after a space, each once.

    Raises RejectedError for a word that has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not (bare and ids):
                raise RejectedError("bad_words holds a word without a token", param="bad_words")
            sequences[ids] = None
    return tuple(sequences)
