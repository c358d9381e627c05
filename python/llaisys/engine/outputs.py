"""What leaves the engine: one value per request and step. Plain data, ready for a wire."""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.errors import LlaisysError
from llaisys.types import FinishReason, RequestId


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one position of prompt or answer, of the model's own distribution.

    `rank` is that of the id that stands there, from 1; `top` holds the best ids with their logprobs in
    falling order.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class EngineOutput:
    """News of one choice of a request. Plain; not frozen because one is made for each row of each step.

    - `index`: which choice. The output with a `finish_reason` is the choice's last, and there is exactly one.
    - `last`: the request's one last output: no other choice of it is open.
    - `new_logprobs`: aligned with `new_token_ids`, or None if not asked for.
    - `stop_reason`: the id of `stop_token_ids` that ended it; None for eos.
    - `num_cached_tokens`: prompt tokens that were not computed anew; in the first output of choice 0.
    - `queued_s`: seconds from arrival until it was first admitted; in the first output of each choice.
    - `new_prompt_logprobs`: of the prompt's tokens from the second on, if asked for; in the same output.
    - `embedding`: what a request that asked for one ends with; see `types.RequestOutput`.
    - `error`: set with the reasons TIMEOUT and ERROR only.
    """

    request_id: RequestId
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    error: LlaisysError | None = None
    index: int = 0
    last: bool = False
    new_prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None


def refusal(request_id: RequestId, error: LlaisysError) -> EngineOutput:
    """The only output of a request that was not taken, or that ends with its engine."""
    return EngineOutput(request_id, [], None, FinishReason.ERROR, error=error, last=True)
