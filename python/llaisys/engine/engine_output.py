"""EngineOutput: the output of one choice in one step, as plain data that can be serialized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llaisys.errors import LlaisysError
from llaisys.outputs import FinishReason, RequestId

if TYPE_CHECKING:
    from llaisys.engine.request import Request


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one position of prompt or output, from the model's unmodified distribution.

    `rank`: the rank of the token at this position, from 1. `top`: the best ids with their logprobs, in
    descending order, or the ids of `logprob_token_ids` in their order.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class EngineOutput:
    """New tokens or the end of one choice of a request. Not frozen: one is made for each row of each step.

    - `index`: the choice. Exactly one output of a choice has a `finish_reason`, and it is the choice's last.
    - `last`: this is the last output of the request, because no other choice of it is open.
    - `new_logprobs`: aligned with `new_token_ids`, or None if not requested.
    - `stop_reason`: the id of `stop_token_ids` that ended the choice. None for eos.
    - `num_cached_tokens`: prompt tokens found in the prefix cache. Only in the first output of choice 0.
    - `queued_s`: seconds from arrival until first admission. Only in the first output of each choice.
    - `new_prompt_logprobs`: one entry per prompt token from the second on, if requested. Only in the first
      output of choice 0.
    - `embedding`, `score`: the result of a pooling request, as in `outputs.RequestOutput`.
    - `num_accepted_prediction_tokens`, `num_rejected_prediction_tokens`: of the choice so far, if this output
      has verified drafts; otherwise 0.
    - `error`: set only with the finish reasons TIMEOUT and ERROR.
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
    score: float | None = None
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0


def rejected_output(request_id: RequestId, error: LlaisysError) -> EngineOutput:
    """Return the only output of a request that was rejected, or that ends with its engine."""
    return EngineOutput(request_id, [], None, FinishReason.ERROR, error=error, last=True)


def token_output(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
) -> EngineOutput:
    """Return the output for new tokens of a choice."""
    return EngineOutput(request.request_id, token_ids, logprobs, index=request.index)
