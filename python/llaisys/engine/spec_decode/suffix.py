"""SuffixProposer: proposes what followed the newest tokens before, in the same request or in earlier outputs
of the same client (SuffixDecoding, arXiv:2411.04975). Pure.

An index of n-grams with bounded occurrences takes the place of the paper's suffix tree: a match is found by
its last `MIN_MATCH` tokens and extended backwards.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from llaisys.engine.request import Request
from llaisys.engine.spec_decode.ngram import OwnTokens
from llaisys.engine.spec_decode.proposer import HostProposer
from llaisys.engine.spec_decode.token_index import (
    Match,
    Ngram,
    Positions,
    continuation,
    longest,
    ngram_before,
)

# Tokens of the shortest match. Shorter ones are common in any text and seldom continue the same way.
MIN_MATCH = 3
# Tokens of all earlier outputs that are kept.
EARLIER_TOKENS_MAX = 1 << 19
# Distance between the positions of two outputs: place `at` of output `number` is `number * _STRIDE + at`.
_STRIDE = EARLIER_TOKENS_MAX + 1


class EarlierOutputs:
    """The newest outputs of finished requests by salt, and the positions after their n-grams.

    `max_outputs`: the number of outputs that are kept; `max_tokens` bounds their tokens. The oldest is
    dropped.
    """

    def __init__(self, max_outputs: int, max_tokens: int = EARLIER_TOKENS_MAX) -> None:
        self._max_outputs, self._max_tokens = max_outputs, min(max_tokens, EARLIER_TOKENS_MAX)
        # By number, with what the keys of its n-grams begin with.
        self._outputs: OrderedDict[int, tuple[bytes, array[int]]] = OrderedDict()
        self._after = Positions()
        self._n_added = self._n_tokens = 0

    def __len__(self) -> int:
        """Return the number of outputs."""
        return len(self._outputs)

    @property
    def n_tokens(self) -> int:
        """Total tokens of all outputs."""
        return self._n_tokens

    @property
    def n_ngrams(self) -> int:
        """Number of n-grams in the index."""
        return len(self._after)

    def add(self, salt: str, tokens: array[int]) -> None:
        """Add an output, and drop the oldest ones beyond the bounds."""
        tokens, prefix = tokens[: self._max_tokens], _prefix(salt)
        number = self._n_added
        self._n_added += 1
        self._outputs[number] = (prefix, tokens)
        self._n_tokens += len(tokens)
        for at, ngram in _ngrams(prefix, tokens):
            self._after.add(ngram, number * _STRIDE + at)
        while len(self._outputs) > self._max_outputs or self._n_tokens > self._max_tokens:
            self._drop_oldest()

    def matches(self, salt: str, key: Ngram) -> list[Match]:
        """Return the newest positions after an n-gram, newest first."""
        positions = reversed(self._after.of(_prefix(salt) + key))
        places = (divmod(position, _STRIDE) for position in positions)
        return [Match(self._outputs[number][1], at) for number, at in places]

    def _drop_oldest(self) -> None:
        number, (prefix, tokens) = self._outputs.popitem(last=False)
        self._n_tokens -= len(tokens)
        for _, ngram in _ngrams(prefix, tokens):
            self._after.drop(ngram, below=(number + 1) * _STRIDE)


def _ngrams(prefix: bytes, tokens: array[int]) -> Iterator[tuple[int, Ngram]]:
    """Yield the place after each n-gram of an output, and the key of the n-gram."""
    for at in range(MIN_MATCH, len(tokens) + 1):
        yield at, prefix + ngram_before(tokens, at, MIN_MATCH)


def _prefix(salt: str) -> bytes:
    """Return what the keys of a salt's n-grams begin with. All keys end with MIN_MATCH tokens, so the keys of
    two salts differ."""
    return salt.encode("utf-8", "surrogatepass")


class SuffixProposer(HostProposer):
    """Proposes from the request's own tokens and from earlier outputs with the same cache salt.

    - `max_depth`: tokens that a match is compared over. `max_outputs`: earlier outputs that are kept.
    - `max_spec_factor`: drafts per token of the match. `min_token_prob`: share of the matches that a draft
      must follow.
    """

    def __init__(
        self, max_depth: int, max_outputs: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self._max_depth = max_depth
        self._max_spec_factor, self._min_token_prob = max_spec_factor, min_token_prob
        self._own = OwnTokens(MIN_MATCH)
        self.earlier = EarlierOutputs(max_outputs)

    def finish(self, request: Request) -> None:
        """Drop the index of a request, and keep its output."""
        self._own.pop(request)
        if request.num_output:
            self.earlier.add(request.source.cache_salt, request.output_from(0))

    def _drafts(self, request: Request, budget: int) -> list[int]:
        index = self._own.index(request)
        matches = index.matches_of_end()
        matches += self.earlier.matches(request.source.cache_salt, index.last_ngram)
        if not matches:
            return []
        best, n = longest(matches, index.tokens, self._max_depth)
        budget = min(budget, int(self._max_spec_factor * n))
        return continuation(best, index.tokens, budget, self._min_token_prob)
