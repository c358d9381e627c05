"""The engine's bounds, and whether a request can ever fit them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.errors import ContextLengthError, RejectedError
from llaisys.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one engine may hold. Invariant: `max_model_len <= n_cells`, so that a lone request always fits.

    - `max_num_seqs`: running requests. `max_num_batched_tokens`: tokens of one step over all requests.
    - `max_num_queued_reqs`: requests that wait because no room is left for them.
    - `max_model_len`: tokens of one request, prompt and answer. `n_cells`: KV cells, one token each.
    - `vocab_size`: token ids are below it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_model_len: int
    n_cells: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.max_model_len > self.n_cells:
            raise RejectedError(
                f"max_model_len {self.max_model_len} is more than the {self.n_cells} KV cells",
                param="max_model_len",
            )


def token_limit(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> int:
    """Tokens, prompt and answer, at which the request ends by length: the KV cells it may need at worst.

    Raises RejectedError (an empty prompt or an id outside the vocabulary) or ContextLengthError with both
    numbers, if the request can never run.
    """
    if not prompt:
        raise RejectedError("the prompt is empty: it needs at least one token", param="prompt")
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), limits.vocab_size)
    wanted = len(prompt) + (1 if params.max_tokens is None else params.max_tokens)
    if wanted > limits.max_model_len:
        raise ContextLengthError(
            f"the context is {limits.max_model_len} tokens, and the request asks for {wanted}: "
            f"{len(prompt)} in the prompt and {wanted - len(prompt)} for the answer",
            param="prompt" if params.max_tokens is None else "max_tokens",
        )
    return limits.max_model_len if params.max_tokens is None else wanted


def _check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        return
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocab_size:
            raise RejectedError(
                f"{param} holds token id {worst}, allowed are 0 to {vocab_size - 1}", param=param
            )
