"""Requests that can never run are rejected with their numbers; those that just fit are accepted."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.asks import ask, limits
from llaisys.engine.limits import check_first_token, token_limit
from llaisys.errors import ContextLengthError, RejectedError, UnsupportedError
from llaisys.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "limit"), [(1, 1, 2), (54, 10, 64), (63, 1, 64), (63, None, 64), (1, None, 64)]
)
def test_the_token_limit_is_prompt_plus_output(n_prompt: int, max_tokens: int | None, limit: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    assert token_limit([1] * n_prompt, params, limits()) == limit


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "param"), [(55, 10, "max_tokens"), (64, None, "prompt"), (64, 1, "max_tokens")]
)
def test_one_token_above_the_context_is_rejected_with_both_numbers(
    n_prompt: int, max_tokens: int | None, param: str
) -> None:
    with pytest.raises(ContextLengthError, match=rf"64 tokens.*{n_prompt} in the prompt") as caught:
        token_limit([1] * n_prompt, SamplingParams(max_tokens=max_tokens), limits())
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [300]}, "prompt", "300"),
        ({"prompt": [0, -1, 3]}, "prompt", "-1"),
        ({"stop_token_ids": [4, 300]}, "stop_token_ids", "300"),
        ({"logit_bias": {300: 1.0}}, "logit_bias", "300"),
        ({"logprob_token_ids": [1, 300]}, "logprob_token_ids", "300"),
    ],
)
def test_ids_outside_the_vocabulary_are_named(changes: dict[str, object], param: str, says: str) -> None:
    source = ask(**changes)
    with pytest.raises(RejectedError, match=says) as caught:
        token_limit(source.prompt_token_ids, source.params, limits())
    assert caught.value.param == param


def test_max_logprobs_bounds_the_named_ids() -> None:
    for most, n in ((20, 20), (0, 0), (-1, 200)):
        token_limit([1], SamplingParams(max_tokens=1, logprob_token_ids=range(n)), limits(max_logprobs=most))
    with pytest.raises(RejectedError, match="has 21 ids, allowed are up to 20") as caught:
        token_limit([1], SamplingParams(logprob_token_ids=range(21)), limits())
    assert caught.value.param == "logprob_token_ids"


def test_one_kv_stream_has_cells_for_a_whole_context() -> None:
    with pytest.raises(RejectedError, match="64 is more than the 63"):
        limits(n_cells=63)
    with pytest.raises(RejectedError, match="64 is more than the 60 KV cells of one of 4 KV streams"):
        limits(n_cells=240, n_streams=4)
    with pytest.raises(RejectedError, match="cannot be divided"):
        limits(n_cells=255, n_streams=2)
    assert limits(n_cells=256, n_streams=4).n_cells_per_stream == 64


def test_a_missing_max_tokens_is_clamped_and_a_large_one_rejected() -> None:
    bounds = limits(max_output_tokens=20)
    assert token_limit([1] * 3, SamplingParams(max_tokens=None), bounds) == 23
    assert token_limit([1] * 60, SamplingParams(max_tokens=None), bounds) == 64
    assert token_limit([1] * 3, SamplingParams(max_tokens=20), bounds) == 23
    with pytest.raises(RejectedError, match="max_tokens is 21, allowed are up to 20") as caught:
        token_limit([1] * 3, SamplingParams(max_tokens=21), bounds)
    assert caught.value.param == "max_tokens"


def test_max_input_tokens_bounds_the_prompt() -> None:
    bounds = limits(max_input_tokens=5)
    assert token_limit([1] * 5, SamplingParams(max_tokens=1), bounds) == 6
    with pytest.raises(ContextLengthError, match="has 6 tokens, max_input_tokens allows at most 5") as caught:
        token_limit([1] * 6, SamplingParams(max_tokens=1), bounds)
    assert caught.value.param == "prompt"


def test_n_is_bounded_by_max_num_seqs() -> None:
    assert token_limit([1], SamplingParams(n=4, max_tokens=1), limits()) == 2
    with pytest.raises(RejectedError, match="n is 5, allowed are up to 4"):
        token_limit([1], SamplingParams(n=5, max_tokens=1), limits())


def test_batch_slots_of_a_step() -> None:
    assert limits().n_batch_slots == 4
    assert limits(max_batch_size=2).n_batch_slots == 2
    assert limits(max_num_batched_tokens=1).n_batch_slots == 1


EOS = (9,)


@pytest.mark.parametrize(
    ("changes", "words", "is_rejected"),
    [
        ({"allowed_token_ids": [3, 4], "bad_words": ["a", "b"]}, ((3,), (4,), (5, 6)), True),
        ({"allowed_token_ids": [3, 4], "bad_words": ["a"]}, ((3,), (4, 4)), False),
        ({"allowed_token_ids": [9], "min_tokens": 1}, (), True),
        ({"allowed_token_ids": [9], "min_tokens": 1, "ignore_eos": True}, (), False),
        ({"allowed_token_ids": [9, 8], "min_tokens": 1, "stop_token_ids": [8]}, (), True),
        ({"allowed_token_ids": [9]}, (), False),
        ({"bad_words": ["a"], "min_tokens": 1}, ((3,),), False),
    ],
)
def test_settings_that_allow_no_first_token_are_rejected(changes: Any, words: Any, is_rejected: bool) -> None:
    source = ask(bad_word_ids=words, eos_token_ids=EOS, **changes)
    if not is_rejected:
        check_first_token(source)
        return
    with pytest.raises(RejectedError, match="leave no token") as caught:
        check_first_token(source)
    assert caught.value.param == "allowed_token_ids"
    assert all(name in str(caught.value) for name in {"bad_words", "min_tokens"} & changes.keys())


def test_a_prediction_needs_speculative_decoding() -> None:
    params = SamplingParams(max_tokens=4, prediction="The sea")
    assert token_limit([1], params, limits(speculates=True)) == 5
    assert token_limit([1], SamplingParams(max_tokens=4, prediction=""), limits()) == 5
    with pytest.raises(UnsupportedError, match="set speculative_config") as caught:
        token_limit([1], params, limits())
    assert caught.value.param == "prediction"
