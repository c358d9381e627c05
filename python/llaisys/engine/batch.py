"""Batch: the rows of one step, and StepResult: what the model computed for them. Plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.engine_output import TokenLogprobs
from llaisys.engine.request import Request
from llaisys.errors import LlaisysError

# The allowed tokens of one row, `[ceil(vocab / 32)]`: bit `id % 32` of word `id / 32`.
Mask = NDArray[np.uint32]


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of a running request, from position `start`. `samples`: the last row samples a token
    or completes the pooled hidden states."""

    request: Request
    start: int
    token_ids: Sequence[int]
    samples: bool

    @property
    def scored(self) -> range:
        """Positions whose rows score a prompt token."""
        return self.request.rows_to_score(self.start, self.start + len(self.token_ids))

    @property
    def pooled(self) -> range:
        """Positions whose rows return their final hidden state."""
        pool = self.request.pool
        return range(0) if pool is None else pool.rows(self.start, self.start + len(self.token_ids))


@dataclass(slots=True)
class Batch:
    """The batch of one step: the newest token of each request of `decode`, with its drafts, then `chunks`.

    An *item* is a request of `decode` or a chunk, numbered in this order.

    - `drafts`: by ordinal, the draft tokens of requests of `decode`; none is empty.
    - `masks`: by ordinal, the masks of a request with a grammar: of the row that samples, then of each draft.
    """

    decode: Sequence[Request]
    chunks: Sequence[Chunk]
    drafts: dict[int, list[int]] = field(default_factory=dict)
    masks: Mapping[int, Sequence[Mask]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.decode) + len(self.chunks)

    def drafts_of(self, request: Request) -> Sequence[int]:
        """Return the draft tokens of a request; empty for most."""
        return self.drafts.get(request.ordinal, ())

    def part(self, first: int, end: int) -> Batch:
        """Return the batch of the items `first <= i < end`."""
        n, decode = len(self.decode), self.decode[first:end]
        drafts = {r.ordinal: self.drafts[r.ordinal] for r in decode if r.ordinal in self.drafts}
        return Batch(decode, self.chunks[max(0, first - n) : max(0, end - n)], drafts, self.masks)

    def sampling(self) -> Iterator[Request]:
        """Iterate over the requests that sample a token, in the order of their rows."""
        yield from self.decode
        yield from (chunk.request for chunk in self.chunks if chunk.samples)

    def request(self, item: int) -> Request:
        """Return the request of an item."""
        n = len(self.decode)
        return self.decode[item] if item < n else self.chunks[item - n].request


@dataclass(slots=True)
class AcceptedTokens:
    """The tokens sampled after the accepted drafts of an item, with their logprobs if requested."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """The result of a batch, by item.

    - `token_ids`: the sampled id of each item; -1 if nothing was sampled. `accepted`: one more token for each
      accepted draft.
    - `logprobs`: of items that request them. `prompt_logprobs`: of the prompt tokens scored by an item's
      rows, in order.
    - `errors`: the error that ends the item's request after its tokens. `hidden`: the final hidden states
      `[n, d_model]` of an item's pooled rows.
    - `rejected`: items that the core rejected even when run alone.
    """

    token_ids: list[int]
    accepted: dict[int, AcceptedTokens] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, LlaisysError] = field(default_factory=dict)
    rejected: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    hidden: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def tokens(self, item: int) -> list[int]:
        """Return the tokens sampled for an item, in order."""
        first = self.token_ids[item]
        accepted = self.accepted.get(item)
        return [*([first] if first >= 0 else []), *(accepted.token_ids if accepted else [])]

    def token_logprobs(self, item: int) -> list[TokenLogprobs] | None:
        """Return the logprobs of `tokens(item)`; None if the request has none."""
        first = self.logprobs.get(item)
        if first is None:
            return None
        accepted = self.accepted.get(item)
        return [first, *(accepted.logprobs if accepted else [])]

    def extend(self, other: StepResult) -> None:
        """Append the results of the next items."""
        n = len(self.token_ids)
        self.token_ids += other.token_ids
        self.accepted |= {n + item: tokens for item, tokens in other.accepted.items()}
        self.logprobs |= {n + item: entry for item, entry in other.logprobs.items()}
        self.prompt_logprobs |= {n + item: entries for item, entries in other.prompt_logprobs.items()}
        self.errors |= {n + item: error for item, error in other.errors.items()}
        self.hidden |= {n + item: rows for item, rows in other.hidden.items()}
        self.rejected += [n + item for item in other.rejected]
