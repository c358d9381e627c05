"""NgramProposer: prompt lookup (Saxena 2023). It proposes what followed the newest tokens where they occurred
before in the same request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.engine.request import Request
from llaisys.engine.spec_decode.proposer import HostProposer
from llaisys.engine.spec_decode.token_index import Match, TokenIndex, continuation, longest, ngram_before


class OwnTokens:
    """The indexes of the tokens of open requests, prompt included."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._indexes: dict[int, TokenIndex] = {}

    def __len__(self) -> int:
        """Return the number of indexed requests."""
        return len(self._indexes)

    def index(self, request: Request) -> TokenIndex:
        """Return the index of all tokens of a request."""
        index = self._indexes.get(request.ordinal)
        if index is None:
            index = self._indexes[request.ordinal] = TokenIndex(self._n)
        index.extend(request.token_ids[len(index.tokens) :])
        return index

    def pop(self, request: Request) -> None:
        """Drop the index of a request."""
        self._indexes.pop(request.ordinal, None)


def matches_in(index: TokenIndex, newest: Sequence[int], key: bytes) -> list[Match]:
    """Return the positions of a text after the n-gram `key`, newest first, without the end of `newest`
    itself."""
    tokens = index.tokens
    positions = reversed(index.positions_after(key))
    return [Match(tokens, at) for at in positions if tokens is not newest or at < len(tokens)]


class NgramProposer(HostProposer):
    """Proposes from the request's own tokens. `min_n`, `max_n`: lengths of a match, in tokens; the longest
    and then the newest match is used."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._own = OwnTokens(min_n)

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        """Return the drafts of each request; see `Proposer`."""
        return [self._drafts(*each) for each in zip(requests, budgets, strict=True)]

    def finish(self, request: Request) -> None:
        """Drop the index of a request."""
        self._own.pop(request)

    def _drafts(self, request: Request, budget: int) -> list[int]:
        index = self._own.index(request)
        tokens = index.tokens
        if len(tokens) < self._min_n:
            return []
        key = ngram_before(tokens, len(tokens), self._min_n)
        best, _ = longest(matches_in(index, tokens, key), tokens, self._max_n)
        return continuation(best[:1], tokens, budget, 1.0)
