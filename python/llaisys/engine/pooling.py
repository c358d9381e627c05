"""Pools the final hidden states of a prompt into an embedding, or the logprobs of two tokens into a score."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.engine_output import EngineOutput, TokenLogprobs
from llaisys.engine.request import BrokenInvariant, Completed, EngineRequest, Failed, Request
from llaisys.errors import RequestFailedError
from llaisys.model_info import Pooling
from llaisys.outputs import FinishReason


class Pool:
    """The pooled part of a request's `n_tokens` final hidden states (after the last norm).

    Rows are added by position: `mean` sums them one after the other in float64, `max` keeps the largest
    number of each dimension, `cls` takes the first and `last` the last row. So the result depends neither on
    the chunks of the prompt nor on the other requests of its batches.

    - `next`: the first position whose hidden state is still needed.
    """

    def __init__(self, pooling: Pooling, n_tokens: int, *, normalize: bool = True) -> None:
        self._n_tokens = n_tokens
        self._pooling, self._normalize = pooling, normalize
        self.next = self._first = n_tokens - 1 if pooling == "last" else 0
        self._end = 1 if pooling == "cls" else n_tokens
        self._sum: NDArray[np.float64] | None = None

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens that may come from the prefix cache, which has no hidden states."""
        return self._n_tokens - 1 if self.next >= self._end else min(self.next, self._n_tokens - 1)

    def rows(self, start: int, end: int) -> range:
        """Return the positions in `start <= p < end` whose hidden states are needed."""
        return range(max(start, self.next), min(end, self._end))

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Add the hidden states `[n, d_model]` of the positions from `next` on; what is not needed is
        ignored."""
        hidden = hidden[: self._end - self.next]
        if self._sum is None:
            self._sum = np.full(hidden.shape[1], -np.inf if self._pooling == "max" else 0.0)
        if self._pooling == "max":
            self._sum = np.maximum(self._sum, hidden.max(axis=0, initial=-np.inf))
        else:
            for row in hidden:  # `hidden.sum(axis=0)` does not guarantee an order of summation
                self._sum += row
        self.next += len(hidden)

    def vector(self) -> bytes | None:
        """Return the pooled rows, with L2 norm 1 if they are normalized: `[d_model]` float32, little endian.

        None if a number is not finite.
        """
        if self._sum is None or self.next != self._end:
            raise BrokenInvariant(f"{self.next} of {self._end} hidden states are pooled")
        pooled = self._sum if self._pooling == "max" else self._sum / (self._end - self._first)
        length = math.sqrt(math.fsum(pooled * pooled))  # exactly rounded, independent of the order
        if not math.isfinite(length):
            return None
        return (pooled / max(length, 1e-12) if self._normalize else pooled).astype("<f4").tobytes()


def new_pool(source: EngineRequest) -> Pool | None:
    """Return the pool of an embedding request; None for others."""
    if source.pooling is None or source.pooling == "score":
        return None
    return Pool(source.pooling, len(source.prompt_token_ids), normalize=source.normalize)


def result_of(request: Request, logprobs: TokenLogprobs | None) -> tuple[Completed | Failed, EngineOutput]:
    """Return the event that ends a pooling request, and its only output.

    `logprobs`: those of the prompt's last row. A score is the probability of the second of `score_token_ids`,
    of these two.
    """
    output = EngineOutput(
        request.request_id, [], num_cached_tokens=request.num_cached or 0, queued_s=request.queued_s
    )
    if request.pool is not None:
        output.embedding = request.pool.vector()
    elif logprobs is not None and len(logprobs.top) == 2:
        output.score = sigmoid(logprobs.top[1][1] - logprobs.top[0][1])
    if output.embedding is None and output.score is None:
        return Failed(
            RequestFailedError("the model computed a number that is not finite for this request")
        ), output
    return Completed(FinishReason.STOP), output


def sigmoid(logit: float) -> float:
    """Return `1 / (1 + e^-logit)`."""
    e = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else e) / (1.0 + e)
