"""Errors of invalid parameters name the field and the bound; valid ones are kept."""

from __future__ import annotations

from typing import Any

import pytest

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.outputs import CompletionOutput
from llaisys.sampling_params import RequestOutputKind, SamplingParams, count_logprobs


def test_defaults_equal_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)


def test_equivalent_values() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("bad", "param", "says"),
    [
        ({"n": 257}, "n", "1 to 256"),
        ({"max_tokens": 0}, "max_tokens", "1 to"),
        ({"max_tokens": 2.5}, "max_tokens", "whole number"),
        ({"max_tokens": True}, "max_tokens", "whole number"),
        ({"min_tokens": -1}, "min_tokens", "0 to"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens 8"),
        ({"temperature": -0.1}, "temperature", "0.0 to 2.0"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"temperature": None}, "temperature", "None"),
        ({"top_p": 0.0}, "top_p", "1.0"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 1.1}, "min_p", "0.0 to 1.0"),
        ({"typical_p": 0}, "typical_p", "1.0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "10.0"),
        ({"presence_penalty": 2.1}, "presence_penalty", "2.0"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "2.0"),
        ({"seed": 2**63}, "seed", "9223372036854775807"),
        ({"logprobs": -2}, "logprobs", "-1 to"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids", "-1"),
        ({"logprob_token_ids": [True]}, "logprob_token_ids", "whole number"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprob_token_ids", "logprobs is 3"),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "-1 to"),
        ({"detokenize": False, "stop": "x"}, "stop", "detokenize"),
        ({"output_kind": 1}, "output_kind", "RequestOutputKind"),
        ({"stop": [""]}, "stop", "1 to 1024"),
        ({"stop": ["x" * 1025]}, "stop", "1025"),
        ({"stop": [3]}, "stop", "expected strings"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids", "at most 256"),
        ({"logit_bias": {5: 101.0}}, "logit_bias[5]", "100.0"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias", "'5'"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "at most 1024"),
    ],
)
def test_invalid_values_name_the_field_and_the_bound(bad: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RejectedError) as caught:
        SamplingParams(**bad)
    assert caught.value.param == param
    assert param.split("[")[0] in str(caught.value)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_logprob_token_ids_set_the_number_of_logprobs() -> None:
    assert [SamplingParams(logprob_token_ids=ids).logprobs for ids in ([7, 8], [], None)] == [2, None, None]
    assert SamplingParams(logprob_token_ids=[], logprobs=3).logprobs == 3
    assert SamplingParams(logprob_token_ids=[5], logprobs=1).logprobs == 1


def test_extra_args_are_refused_by_name() -> None:
    for empty in (None, {}):
        assert not SamplingParams(extra_args=empty).extra_args
    with pytest.raises(UnsupportedError, match="extra_args has 'kv_transfer_params'") as caught:
        SamplingParams(extra_args={"kv_transfer_params": {}})
    assert caught.value.param == "extra_args"


def test_output_kinds_are_those_of_vllm() -> None:
    assert {kind.name: kind.value for kind in RequestOutputKind} == {
        "CUMULATIVE": 0,
        "DELTA": 1,
        "FINAL_ONLY": 2,
    }
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE
    assert SamplingParams().detokenize


@pytest.mark.parametrize(
    ("value", "maximum", "n"), [(0, 0, 0), (20, 20, 20), (-1, -1, 300), (500, -1, 300), (-1, 300, 300)]
)
def test_logprobs_are_counted(value: int, maximum: int, n: int) -> None:
    assert count_logprobs("logprobs", value, maximum, 300) == n


@pytest.mark.parametrize(
    ("value", "maximum", "says"), [(21, 20, "is 21, allowed are up to 20"), (-1, 299, "vocabulary of 300")]
)
def test_more_logprobs_than_the_maximum_are_refused(value: int, maximum: int, says: str) -> None:
    with pytest.raises(RejectedError, match=says) as caught:
        count_logprobs("top_logprobs", value, maximum, 300)
    assert caught.value.param == "top_logprobs"
    assert "max_logprobs" in str(caught.value)


def test_a_completion_is_finished_with_its_reason() -> None:
    assert not CompletionOutput(0, "", []).finished()
    assert CompletionOutput(0, "", [], finish_reason="stop").finished()
