"""The outputs of a request, with vLLM's names and fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RequestId: TypeAlias = str


class FinishReason(str, Enum):
    """The reason why a request ended. `STOP` and `LENGTH` are OpenAI's; `ABORT` is in the Python API only."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position: natural log of its probability, rank (1 is the best) and text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request, or a delta of it while streaming.

    `num_accepted_prediction_tokens`, `num_rejected_prediction_tokens`: tokens of `SamplingParams.prediction`
    that became output, and those that were verified in vain, so far.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0

    def finished(self) -> bool:
        """Return True once `finish_reason` is set."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Token counts of a request, named as in OpenAI's `usage`: the prompt once, and all choices.

    `cached_tokens`: prompt tokens whose KV came from the prefix cache. `accepted_prediction_tokens`,
    `rejected_prediction_tokens`: tokens of the prediction that became output, and those verified in vain.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(slots=True)
class RequestStateStats:
    """The times and the tokens of a request so far, with vLLM's names. Later outputs update the same object.

    - `arrival_time`: Unix time of the submission.
    - `queued_ts` (submitted), `scheduled_ts` (first admitted), `first_token_ts`, `last_token_ts` (delivered):
      `time.monotonic` seconds, 0.0 before.
    - `num_generation_tokens`: of all choices. `first_token_latency`: seconds from submission to first token.
    """

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0

    def record_tokens(self, n_tokens: int, queued_s: float, now_s: float) -> None:
        """Count new tokens that arrived at `now_s`. `queued_s`: of the request's first output."""
        if not self.num_generation_tokens:
            self.scheduled_ts = self.queued_ts + queued_s
            self.first_token_ts, self.first_token_latency = now_s, now_s - self.queued_ts
        self.last_token_ts = now_s
        self.num_generation_tokens += n_tokens


@dataclass(slots=True)
class RequestOutput:
    """The output of a request, with vLLM's fields and some additional ones.

    - `prompt_logprobs`, if requested: one entry per prompt token, None for the first.
    - `embedding`, if requested in place of a completion: `[d_model]` float32, little endian.
    - `score`, if requested in place of a completion: how relevant the document is to the query, 0 to 1.
    - `queued_s`: seconds from arrival until first admission, set in the first delta.
    - `metrics`: the times of the request; None for an embedding, and for a request that was not submitted.
    """

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    embedding: bytes | None = None
    score: float | None = None
    queued_s: float = 0.0
    metrics: RequestStateStats | None = None

    @property
    def usage(self) -> CompletionUsage:
        """Token counts of this output. For a streamed delta, `completion_tokens` counts the delta alone."""
        n_prompt, n_new = len(self.prompt_token_ids), sum(len(each.token_ids) for each in self.outputs)
        accepted = sum(each.num_accepted_prediction_tokens for each in self.outputs)
        rejected = sum(each.num_rejected_prediction_tokens for each in self.outputs)
        return CompletionUsage(n_prompt, n_new, n_prompt + n_new, self.num_cached_tokens, accepted, rejected)


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """The result of `LLM.encode`. `data`: the pooled hidden states, `[d_model]` float32.

    In vLLM `data` is a tensor of PyTorch, here an array of NumPy.
    """

    data: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        """Return True for equal numbers."""
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]  # as in vLLM


@dataclass(slots=True)
class EmbeddingOutput:
    """The result of `LLM.embed`: a vector of `hidden_size` numbers."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    """The result of `LLM.score`: what a reranker computed, 0 to 1, or a cosine similarity, -1 to 1."""

    score: float


PooledT = TypeVar("PooledT", PoolingOutput, EmbeddingOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[PooledT]):
    """The output of a request of `LLM.encode`, `embed` or `score`, which is in `outputs`."""

    request_id: RequestId
    outputs: PooledT
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The output of one prompt of `LLM.embed`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The output of one pair of `LLM.score`, which has the token ids of both texts."""
