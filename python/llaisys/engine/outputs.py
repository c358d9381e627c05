"""What leaves the engine: one value per request and step. Plain data, ready for a wire."""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.errors import LlaisysError
from llaisys.types import FinishReason, RequestId


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one generated position, of the model's own distribution.

    `rank` is the sampled id's, from 1; `top` holds the best ids with their logprobs in falling order.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """News of one request. The one with a `finish_reason` is its last, and there is exactly one such.

    - `new_logprobs`: aligned with `new_token_ids`, or None if not asked for.
    - `stop_reason`: the id of `stop_token_ids` that ended it; None for eos.
    - `error`: set with the reasons TIMEOUT and ERROR only.
    """

    request_id: RequestId
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: LlaisysError | None = None
