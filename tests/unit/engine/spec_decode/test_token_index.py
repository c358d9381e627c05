"""The index of tokens finds every recent match, and continues it as most matches did."""

from __future__ import annotations

import gc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from llaisys.engine.spec_decode.token_index import (
    OCCURRENCES_MAX,
    Match,
    Positions,
    TokenIndex,
    continuation,
    longest,
    ngram_before,
)


def index_of(tokens: list[int], n: int = 2) -> TokenIndex:
    index = TokenIndex(n)
    index.extend(array("i", tokens))
    return index


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 3), st.data())
def test_positions_are_those_of_a_search_over_the_text(
    tokens: list[int], n: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    index = index_of(tokens[:cut], n)
    index.extend(array("i", tokens[cut:]))
    for end in range(n, len(tokens) + 1):
        ngram = tokens[end - n : end]
        found = [at for at in range(n, len(tokens) + 1) if tokens[at - n : at] == ngram]
        key = ngram_before(index.tokens, end, n)
        assert [*index.positions_after(key)] == found[-OCCURRENCES_MAX:]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_positions_are_dropped_from_the_oldest_on(steps: list[tuple[int, bool]]) -> None:
    """Adds a position to one of three n-grams, or drops those of an n-gram that are older than the newest
    two additions."""
    positions, kept = Positions(), dict[bytes, list[int]]()
    for at, (key, drops) in enumerate(steps):
        ngram = b"%d" % key
        if drops:
            positions.drop(ngram, below=at - 2)
            kept[ngram] = [each for each in kept.get(ngram, []) if each >= at - 2]
        else:
            positions.add(ngram, at)
            kept[ngram] = [*kept.get(ngram, []), at][-OCCURRENCES_MAX:]
        assert [*positions.of(ngram)] == kept[ngram]
        assert len(positions) == sum(map(bool, kept.values()))


def test_an_ngram_is_no_object_for_the_garbage_collector() -> None:
    """Half a million would take a full collection tenths of a second."""
    positions = Positions()
    n_before = len(gc.get_objects())
    for at in range(30_000):
        positions.add(b"%d" % (at % 20_000), at)  # once or twice
    assert len(gc.get_objects()) - n_before < 100


def test_the_longest_matches_are_kept() -> None:
    tokens = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    matches = [Match(tokens, 3), Match(tokens, 6)]
    assert longest(matches, tokens, 10) == ([matches[0]], 3)
    assert longest(matches, tokens, 2) == (matches, 2)
    assert longest([], tokens, 10) == ([], 0)


def test_a_continuation_follows_most_matches() -> None:
    texts = [[0, 5, 6], [0, 5, 7], [0, 4, 4]]
    matches = [Match(text, 1) for text in texts]
    assert continuation(matches, [], 8, 0.0) == [5, 6]
    assert continuation(matches, [], 8, 0.5) == [5], "one of three follows with 6"
    assert continuation(matches, [], 0, 0.0) == []


def test_own_text_continues_with_its_own_drafts() -> None:
    own = [1, 2, 3, 1, 2, 3]
    assert continuation([Match(own, 3)], own, 7, 1.0) == [1, 2, 3, 1, 2, 3, 1]
    assert continuation([Match([*own], 3)], own, 7, 1.0) == [1, 2, 3]
