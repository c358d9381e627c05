"""Pools the final hidden states of a prompt into one embedding."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.request import BrokenInvariant, Completed, EngineRequest, Failed, Request
from llaisys.errors import RequestFailedError
from llaisys.model_info import Pooling
from llaisys.outputs import FinishReason


class Pool:
    """The pooled part of a request's `n_tokens` final hidden states (after the last norm).

    Rows are added by position and summed one after the other in float64. So the result depends neither on the
    chunks of the prompt nor on the other requests of its batches.

    - `next`: the first position whose hidden state is still needed.
    """

    def __init__(self, pooling: Pooling, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self.next = self._first = 0 if pooling == "mean" else n_tokens - 1
        self._sum: NDArray[np.float64] | None = None

    @property
    def num_reusable(self) -> int:
        """Number of leading tokens that may come from the prefix cache, which has no hidden states."""
        return min(self.next, self._n_tokens - 1)

    def rows(self, start: int, end: int) -> range:
        """Return the positions in `start <= p < end` whose hidden states are needed."""
        return range(max(start, self.next), end)

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Add the hidden states `[n, d_model]` of the positions from `next` on."""
        if self._sum is None:
            self._sum = np.zeros(hidden.shape[1])
        for row in hidden:  # `hidden.sum(axis=0)` does not guarantee an order of summation
            self._sum += row
        self.next += len(hidden)

    def vector(self) -> bytes | None:
        """Return the mean of the added rows, with L2 norm 1: `[d_model]` float32, little endian.

        None if a number is not finite.
        """
        if self._sum is None or self.next != self._n_tokens:
            raise BrokenInvariant(f"{self.next} of {self._n_tokens} hidden states are pooled")
        mean = self._sum / (self._n_tokens - self._first)
        length = math.sqrt(math.fsum(mean * mean))  # exactly rounded, independent of the order
        if not math.isfinite(length):
            return None
        return (mean / max(length, 1e-12)).astype("<f4").tobytes()


def new_pool(source: EngineRequest) -> Pool | None:
    """Return the pool of an embedding request; None for others."""
    return None if source.pooling is None else Pool(source.pooling, len(source.prompt_token_ids))


def embedding_of(request: Request) -> tuple[Completed | Failed, EngineOutput]:
    """Return the event that ends an embedding request, and its only output."""
    vector = None if request.pool is None else request.pool.vector()
    output = EngineOutput(
        request.request_id,
        [],
        num_cached_tokens=request.num_cached or 0,
        queued_s=request.queued_s,
        embedding=vector,
    )
    if vector is None:
        return Failed(
            RequestFailedError("the model computed a number that is not finite for this request")
        ), output
    return Completed(FinishReason.STOP), output
