"""NgramProposer: prompt lookup (Saxena 2023). It proposes what followed the newest tokens where they occurred
before in the same request. Pure."""

from __future__ import annotations

from llaisys.engine.request import Request
from llaisys.engine.spec_decode.proposer import HostProposer
from llaisys.engine.spec_decode.token_index import TokenIndex, continuation, longest


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


class NgramProposer(HostProposer):
    """Proposes from the request's own tokens. `min_n`, `max_n`: lengths of a match, in tokens; the longest
    and then the newest match is used."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._own = OwnTokens(min_n)

    def finish(self, request: Request) -> None:
        """Drop the index of a request."""
        self._own.pop(request)

    def _drafts(self, request: Request, budget: int) -> list[int]:
        index = self._own.index(request)
        if not (matches := index.matches_of_end()):
            return []
        best, _ = longest(matches, index.tokens, self._max_n)
        return continuation(best[:1], index.tokens, budget, 1.0)
