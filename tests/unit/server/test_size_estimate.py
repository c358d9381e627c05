"""The estimated size of a response: accurate to 10 %, and rejected with its numbers if too large."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.outputs import Logprob
from llaisys.sampling_params import SamplingParams
from llaisys.server.completion_builder import (
    CANDIDATE_BYTES,
    CHAT_CANDIDATE_BYTES,
    CHAT_TOKEN_BYTES,
    FLOAT_BYTES,
    ID_BYTES,
    PROMPT_CANDIDATE_BYTES,
    TOKEN_BYTES,
    CompletionLogprobs,
    chat_logprobs,
    check_embeddings_size,
    check_response_size,
    prompt_logprobs,
)
from llaisys.server.http_errors import to_json
from llaisys.server.protocol import ResponseOptions, UsageOptions

N_MOST = Config().max_response_bytes
N_TOKENS = 100


def candidates(n_top: int) -> dict[int, Logprob]:
    return {10_000 + i: Logprob(-12.345678329467773, 10_000 + i, f" t{i:02}") for i in range(n_top + 1)}


@pytest.mark.parametrize("n_top", [0, 5, 20])
def test_estimated_bytes_per_token_are_accurate(n_top: int) -> None:
    """The estimates are within 10 % of the encoded size of tokens of 4 characters."""
    ids, logprobs = [10_000] * N_TOKENS, [candidates(n_top)] * N_TOKENS
    made: list[tuple[Any, float]] = [
        (CompletionLogprobs().delta(ids, logprobs, n_top + 1), TOKEN_BYTES + CANDIDATE_BYTES * (n_top + 1)),
        (chat_logprobs(ids, logprobs, n_top), CHAT_TOKEN_BYTES + CHAT_CANDIDATE_BYTES * (n_top + 1)),
        (prompt_logprobs(logprobs), PROMPT_CANDIDATE_BYTES * (n_top + 1)),
        (ids, ID_BYTES),
        ([0.012345678901234567] * N_TOKENS, FLOAT_BYTES),
    ]
    for value, each in made:
        assert 0.9 < len(to_json(value)) / N_TOKENS / each < 1.1


def options(n_top: int | None, **more: Any) -> ResponseOptions:
    return ResponseOptions(usage=UsageOptions(False, False), n_top=n_top, **more)


@pytest.mark.parametrize(
    ("n_tokens", "fields", "more", "is_chat"),
    [
        ([8192], {"logprobs": 20, "n": 8, "max_tokens": None}, {}, True),
        ([131_072], {"logprobs": 20, "n": 8, "max_tokens": 32_768}, {}, False),
        ([8192], {"logprobs": 20, "max_tokens": 8192, "ignore_eos": True}, {}, True),
        # lm-eval scores completions this way.
        ([2048] * 128, {"logprobs": 5, "prompt_logprobs": 5, "max_tokens": 1}, {"echo": True}, False),
        ([6000], {"prompt_logprobs": 20}, {"prompt_logprobs": True}, False),
        ([100] * 128, {"n": 8, "max_tokens": 4096}, {}, False),
        # The size of a stream is not bounded.
        ([8192], {"logprobs": 20, "max_tokens": 10**6, "ignore_eos": True}, {"stream": True}, False),
    ],
)
def test_ordinary_requests_are_accepted(
    n_tokens: list[int], fields: dict[str, Any], more: dict[str, Any], is_chat: bool
) -> None:
    params = SamplingParams(**fields)
    check_response_size(N_MOST, n_tokens, params, options(params.logprobs, **more), is_chat=is_chat)


@pytest.mark.parametrize(
    ("n_tokens", "fields", "more", "param"),
    [
        ([1100] * 40, {"n": 8, "logprobs": 20, "prompt_logprobs": 20}, {"echo": True}, "logprobs"),
        (
            [1100] * 40,
            {"n": 8, "logprobs": 20, "prompt_logprobs": 20},
            {"echo": True, "stream": True},
            "logprobs",
        ),
        ([6000] * 20, {"prompt_logprobs": 20}, {"prompt_logprobs": True}, "prompt_logprobs"),
        ([100], {"logprobs": 20, "n": 8, "max_tokens": 10**5, "ignore_eos": True}, {}, "logprobs"),
        ([100] * 128, {"n": 8, "min_tokens": 10**5, "max_tokens": None}, {}, "n"),
    ],
)
def test_too_large_responses_are_rejected_with_their_numbers(
    n_tokens: list[int], fields: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(
        RejectedError, match=rf"{len(n_tokens)} prompts.*max_response_bytes allows {N_MOST}"
    ) as caught:
        check_response_size(N_MOST, n_tokens, params, options(params.logprobs, **more), is_chat=False)
    assert caught.value.param == param


def test_too_many_embeddings_are_rejected_with_their_numbers() -> None:
    check_embeddings_size(N_MOST, 2048, 4096, as_base64=True)
    check_embeddings_size(N_MOST, 2048, 3072, as_base64=False)
    with pytest.raises(RejectedError, match=r"2048 vectors of 4096 numbers.*or encoding_format base64"):
        check_embeddings_size(N_MOST, 2048, 4096, as_base64=False)


@pytest.mark.parametrize("stream", [True, False])
async def test_forty_prompts_with_all_logprobs_are_rejected_before_they_run(
    engine: FakeService, client: httpx.AsyncClient, stream: bool
) -> None:
    """The response to this body once had 169 MB."""
    prompts = [f"{i:04}" * 1100 for i in range(40)]
    body = {"prompt": prompts, "n": 8, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
    assert 170_000 < len(json.dumps(body)) < 190_000
    response = await client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "logprobs")
    assert "40 prompts, 176000 tokens, n 8, logprobs 20" in error["message"]
    assert not engine.calls
    engine.script = [Piece(["a"], "stop", index=i) for i in range(2)]
    fewer = {**body, "prompt": prompts[:2], "n": 2, "logprobs": 5}
    assert (await client.post("/v1/completions", json=fewer)).status_code == 200
