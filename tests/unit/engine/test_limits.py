"""What can never run is refused with its numbers; what fits by one token is not."""

from __future__ import annotations

import pytest

from fakes.asks import ask, limits
from llaisys.engine.limits import token_limit
from llaisys.errors import ContextLengthError, RejectedError
from llaisys.types import SamplingParams


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "limit"), [(1, 1, 2), (54, 10, 64), (63, 1, 64), (63, None, 64), (1, None, 64)]
)
def test_the_limit_is_prompt_and_answer(n_prompt: int, max_tokens: int | None, limit: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    assert token_limit([1] * n_prompt, params, limits()) == limit


@pytest.mark.parametrize(
    ("n_prompt", "max_tokens", "param"), [(55, 10, "max_tokens"), (64, None, "prompt"), (64, 1, "max_tokens")]
)
def test_one_token_too_many_is_refused_with_both_numbers(
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
    ],
)
def test_ids_outside_the_vocabulary_are_named(changes: dict[str, object], param: str, says: str) -> None:
    asked = ask(**changes)
    with pytest.raises(RejectedError, match=says) as caught:
        token_limit(asked.prompt_token_ids, asked.params, limits())
    assert caught.value.param == param


def test_a_lone_request_always_fits_the_cells() -> None:
    with pytest.raises(RejectedError, match="64 is more than the 63"):
        limits(n_cells=63)
