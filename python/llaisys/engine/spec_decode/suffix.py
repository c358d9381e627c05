"""SuffixProposer: proposes what followed the newest tokens before, in the same request or in earlier outputs
of the same client (SuffixDecoding, arXiv:2411.04975). Pure.

An index of n-grams with bounded occurrences takes the place of the paper's suffix tree: a match is found by
its last `MIN_MATCH` tokens and extended backwards.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from llaisys.engine.request import Request
from llaisys.engine.spec_decode.ngram import OwnTokens
from llaisys.engine.spec_decode.proposer import HostProposer
from llaisys.engine.spec_decode.token_index import (
    OCCURRENCES_MAX,
    Match,
    Ngram,
    continuation,
    longest,
    ngram_before,
)

# Tokens of the shortest match. Shorter ones are common in any text and seldom continue the same way.
MIN_MATCH = 3
# Tokens of all earlier outputs that are kept.
EARLIER_TOKENS_MAX = 1 << 19


class EarlierOutputs:
    """The newest outputs of finished requests by salt, and the positions after their n-grams.

    `max_outputs`: the number of outputs that are kept; `max_tokens` bounds their tokens. The oldest is
    dropped.
    """

    def __init__(self, max_outputs: int, max_tokens: int = EARLIER_TOKENS_MAX) -> None:
        self._max_outputs, self._max_tokens = max_outputs, max_tokens
        self._outputs: OrderedDict[int, tuple[str, array[int]]] = OrderedDict()
        # Number of the output and position in it.
        self._after: dict[tuple[str, Ngram], list[tuple[int, int]]] = {}
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
        tokens = tokens[: self._max_tokens]
        number = self._n_added
        self._n_added += 1
        self._outputs[number] = (salt, tokens)
        self._n_tokens += len(tokens)
        for end in range(MIN_MATCH, len(tokens) + 1):
            places = self._after.setdefault((salt, ngram_before(tokens, end, MIN_MATCH)), [])
            places.append((number, end))
            if len(places) > OCCURRENCES_MAX:
                del places[0]
        while len(self._outputs) > self._max_outputs or self._n_tokens > self._max_tokens:
            self._drop_oldest()

    def matches(self, salt: str, key: Ngram) -> list[Match]:
        """Return the newest positions after an n-gram, newest first."""
        places = reversed(self._after.get((salt, key), ()))
        return [Match(self._outputs[number][1], at) for number, at in places]

    def _drop_oldest(self) -> None:
        number, (salt, tokens) = self._outputs.popitem(last=False)
        self._n_tokens -= len(tokens)
        for end in range(MIN_MATCH, len(tokens) + 1):
            key = (salt, ngram_before(tokens, end, MIN_MATCH))
            places = [place for place in self._after.get(key, ()) if place[0] != number]
            if places:
                self._after[key] = places
            else:
                self._after.pop(key, None)


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
