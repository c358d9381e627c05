"""TokenIndex: finds where the newest tokens of a request occurred before. Pure."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Occurrences of one n-gram that are kept: the newest ones.
OCCURRENCES_MAX = 8

Ngram: TypeAlias = bytes
_ITEM_BYTES = array("i").itemsize
_POSITION_BYTES = array("q").itemsize
_POSITIONS_BYTES_MAX = OCCURRENCES_MAX * _POSITION_BYTES


def ngram_before(tokens: array[int], end: int, n: int) -> Ngram:
    """Return the key of the `n` tokens before position `end`."""
    return tokens[end - n : end].tobytes()


class Positions:
    """The newest OCCURRENCES_MAX numbers that were added for each n-gram, ascending.

    There may be half a million n-grams. The numbers of each are in one `bytes` object, because lists and
    tuples are objects that the garbage collector visits, during which no request gets a token.
    """

    def __init__(self) -> None:
        self._by_ngram: dict[Ngram, bytes] = {}

    def __len__(self) -> int:
        """Return the number of n-grams."""
        return len(self._by_ngram)

    def add(self, ngram: Ngram, position: int) -> None:
        """Add a number that is larger than all others of the n-gram."""
        new = position.to_bytes(_POSITION_BYTES, sys.byteorder)
        old = self._by_ngram.get(ngram)
        self._by_ngram[ngram] = new if old is None else (old + new)[-_POSITIONS_BYTES_MAX:]

    def of(self, ngram: Ngram) -> array[int]:
        """Return the numbers of an n-gram."""
        return array("q", self._by_ngram.get(ngram, b""))

    def drop(self, ngram: Ngram, below: int) -> None:
        """Drop the numbers of an n-gram that are smaller than `below`."""
        kept = array("q", (position for position in self.of(ngram) if position >= below))
        if kept:
            self._by_ngram[ngram] = kept.tobytes()
        else:
            self._by_ngram.pop(ngram, None)


class TokenIndex:
    """A text of tokens, and the newest positions after each n-gram of it.

    `n`: the length of the n-grams, which is the shortest match. Memory is proportional to the tokens.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.tokens: array[int] = array("i")
        # The key of the last `n` tokens; empty for a shorter text, which no n-gram is.
        self.last_ngram: Ngram = b""
        self._after = Positions()

    def extend(self, tokens: array[int]) -> None:
        """Append tokens."""
        n, begin = self.n, max(len(self.tokens) + 1, self.n)
        self.tokens += tokens
        raw, after = self.tokens[begin - n :].tobytes(), self._after
        for end in range(begin, len(self.tokens) + 1):
            at = (end - begin) * _ITEM_BYTES
            self.last_ngram = raw[at : at + n * _ITEM_BYTES]
            after.add(self.last_ngram, end)

    def matches_of_end(self) -> list[Match]:
        """Return the earlier positions after the last `n` tokens, newest first."""
        # The last position is the end itself.
        return [Match(self.tokens, at) for at in self.positions_after(self.last_ngram)[-2::-1]]

    def positions_after(self, ngram: Ngram) -> array[int]:
        """Return the newest positions after an n-gram of `n` tokens, ascending."""
        return self._after.of(ngram)


@dataclass(frozen=True, slots=True)
class Match:
    """A position of a text whose preceding tokens equal the newest tokens of a request."""

    tokens: Sequence[int]
    position: int

    def length(self, newest: Sequence[int], most: int) -> int:
        """Return the number of tokens, up to `most`, before the position that equal the end of `newest`."""
        tokens, position = self.tokens, self.position
        most = min(most, position, len(newest))
        if tokens[position - most : position] == newest[len(newest) - most :]:
            return most
        for n in range(most):
            if tokens[position - 1 - n] != newest[-1 - n]:
                return n
        return most


def longest(matches: Sequence[Match], newest: Sequence[int], most: int) -> tuple[list[Match], int]:
    """Return the longest matches with the end of `newest`, and their length, at most `most`."""
    lengths = [match.length(newest, most) for match in matches]
    best = max(lengths, default=0)
    return [match for match, n in zip(matches, lengths, strict=True) if n == best and n], best


def continuation(matches: Sequence[Match], own: Sequence[int], n_tokens: int, min_prob: float) -> list[int]:
    """Return up to `n_tokens` tokens that follow most of the matches, with the newest match as tiebreak.

    It ends where the share of all matches that it follows is below `min_prob`. A match in `own`, the
    request's own tokens, continues with the drafts at their end, so that periodic text is continued.
    """
    following = [match.tokens[match.position : match.position + n_tokens] for match in matches]
    if following and len(following[0]) == n_tokens and all(each == following[0] for each in following):
        return list(following[0])  # all matches agree
    drafts: list[int] = []
    followed = [(match.tokens, match.position) for match in matches]
    n_min = min_prob * len(followed)
    while len(drafts) < n_tokens:
        nexts = [_next(tokens, at + len(drafts), own, drafts) for tokens, at in followed]
        counts = Counter(token for token in nexts if token is not None)
        if not counts:
            break
        token, n = counts.most_common(1)[0]
        if n < n_min:
            break
        drafts.append(token)
        followed = [each for each, candidate in zip(followed, nexts, strict=True) if candidate == token]
    return drafts


def _next(tokens: Sequence[int], at: int, own: Sequence[int], drafts: Sequence[int]) -> int | None:
    if at < len(tokens):
        return tokens[at]
    return drafts[at - len(tokens)] if tokens is own else None
