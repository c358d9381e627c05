"""Each proposer drafts what followed the newest tokens before, within its bounds."""

from __future__ import annotations

from array import array

import pytest

from fakes.asks import ask
from llaisys.engine.request import Request
from llaisys.engine.spec_decode.ngram import NgramProposer
from llaisys.engine.spec_decode.prediction import PredictionProposer
from llaisys.engine.spec_decode.suffix import EarlierOutputs, SuffixProposer


def request(
    ordinal: int, prompt: list[int], output: list[int], *, salt: str = "", **changes: object
) -> Request:
    source = ask(f"{ordinal}", prompt, cache_salt=salt, **changes)
    made = Request(source, ordinal, 0, 1000)
    made.token_ids.extend(output)
    return made


def ngram(min_n: int = 2, max_n: int = 4) -> NgramProposer:
    return NgramProposer(min_n, max_n)


def suffix(max_outputs: int = 10, factor: float = 8.0, min_prob: float = 0.1) -> SuffixProposer:
    return SuffixProposer(24, max_outputs, factor, min_prob)


# --- ngram ---


def test_ngram_prefers_the_longest_match_and_then_the_newest() -> None:
    prompt = [1, 2, 3, 50, 2, 3, 60, 2, 3, 70]
    assert ngram().propose([request(1, prompt, [1, 2, 3])], [3]) == [[50, 2, 3]]
    assert ngram().propose([request(1, prompt, [9, 2, 3])], [2]) == [[70, 9]]


def test_ngram_without_a_match_proposes_nothing() -> None:
    assert ngram().propose([request(1, [1], []), request(2, [1, 2, 3], [2])], [4, 4]) == [[], []]


def test_ngram_continues_periodic_text() -> None:
    assert ngram().propose([request(1, [7, 8, 7, 8], [])], [5]) == [[7, 8, 7, 8, 7]]


@pytest.mark.parametrize("make", [ngram, suffix])
def test_proposals_follow_appended_tokens_and_respect_budgets(make: type[NgramProposer]) -> None:
    proposer, made = make(), request(1, [1, 2, 3, 4, 5, 6], [9])
    assert proposer.propose([made], [2]) == [[]]
    made.token_ids.extend([1, 2, 3])
    assert proposer.propose([made], [2]) == [[4, 5]]
    assert proposer.propose([made], [0]) == [[]]


# --- suffix ---


def test_suffix_uses_earlier_outputs_of_the_same_salt_only() -> None:
    proposer = suffix()
    proposer.finish(request(1, [1], [10, 11, 12, 13, 14, 15], salt="a"))
    same, other = request(2, [3], [10, 11, 12], salt="a"), request(3, [3], [10, 11, 12], salt="b")
    assert proposer.propose([same, other], [8, 8]) == [[13, 14, 15], []]


def test_suffix_drafts_are_bounded_by_the_match() -> None:
    proposer = suffix(factor=1.0)
    proposer.finish(request(1, [1], [10, 11, 12, 13, 14, 15, 16]))
    assert proposer.propose([request(2, [3], [10, 11, 12])], [8]) == [[13, 14, 15]]
    assert proposer.propose([request(3, [3], [10, 11, 12, 13])], [8]) == [[14, 15, 16]]


def test_suffix_follows_the_majority_down_to_its_minimum() -> None:
    outputs = [[1, 2, 3, 20, 30], [1, 2, 3, 20, 31], [1, 2, 3, 21, 32]]
    for min_prob, want in ((0.1, [20, 31]), (0.5, [20]), (0.9, [])):
        proposer = suffix(min_prob=min_prob)
        for i, output in enumerate(outputs):
            proposer.finish(request(i, [5], output))
        assert proposer.propose([request(9, [4], [1, 2, 3])], [8]) == [want]


def test_earlier_outputs_are_bounded_and_leave_nothing() -> None:
    earlier = EarlierOutputs(max_outputs=3, max_tokens=20)
    for i in range(50):
        earlier.add("ab"[i % 2], array("i", range(i, i + 5 + i % 7)))
        assert len(earlier) <= 3
        assert earlier.n_tokens <= 20
        assert earlier.n_ngrams <= 20
    earlier.add("a", array("i", range(100)))
    assert (len(earlier), earlier.n_tokens) == (1, 20)
    none = EarlierOutputs(max_outputs=0)
    none.add("a", array("i", range(9)))
    assert (len(none), none.n_tokens, none.n_ngrams) == (0, 0, 0)


# --- prediction ---


def predicted(prediction: list[int], output: list[int]) -> Request:
    return request(1, [99, 98], output, prediction_token_ids=prediction)


def test_prediction_is_proposed_from_its_start() -> None:
    proposer = PredictionProposer(ngram())
    assert proposer.propose([predicted([1, 2, 3, 4], [])], [3]) == [[1, 2, 3]]
    assert proposer.propose([predicted([1, 2, 3, 4], [1, 2])], [3]) == [[3, 4]]
    assert proposer.from_prediction == {1}


@pytest.mark.parametrize(
    ("output", "want"),
    [
        ([1, 2, 70, 4, 5], [6, 7]),  # one token changed
        ([1, 2, 4, 5], [6, 7]),  # one removed
        ([1, 2, 70, 71, 3, 4], [5, 6, 7]),  # two added
        ([1, 2, 70], []),  # not found again yet
        ([1, 2, 3, 4, 5, 6, 7], []),  # at its end
    ],
)
def test_prediction_continues_after_a_difference(output: list[int], want: list[int]) -> None:
    made = predicted([1, 2, 3, 4, 5, 6, 7], [])
    proposer = PredictionProposer(ngram())
    for token in output:
        proposer.propose([made], [4])
        made.token_ids.append(token)
    assert proposer.propose([made], [4]) == [want]


def test_without_a_use_of_the_prediction_the_other_proposer_is_asked() -> None:
    proposer = PredictionProposer(ngram())
    done = predicted([1, 2], [1, 2, 7, 8, 9, 7, 8])
    plain = request(2, [7, 8, 9, 7, 8], [])
    assert proposer.propose([done, plain], [1, 1]) == [[9], [9]]
    assert proposer.from_prediction == set()


def test_ended_requests_leave_no_state() -> None:
    for make in (ngram, suffix):
        proposer = make()
        outer = PredictionProposer(proposer)
        ended = [request(i, [1, 2, 3], [4, 5], prediction_token_ids=[4]) for i in range(5)]
        outer.propose(ended, [4] * 5)
        outer.finish(ended[0])
        outer.finish(ended[0])
        for each in ended[1:]:
            outer.finish(each)
        assert len(proposer._own) == len(outer._open) == 0
