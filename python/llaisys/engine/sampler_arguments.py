"""The arguments of the core's `SamplerSpec` for a request. Pure."""

from __future__ import annotations

from typing import Any

from llaisys.engine.request import Request
from llaisys.sampling_params import ALL_LOGPROBS, TOKENS_MAX


def sampler_arguments(request: Request) -> dict[str, Any]:
    """Return the keyword arguments of `SamplerSpec`."""
    params, scored = request.source.params, request.source.score_token_ids or ()
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": list(params.logit_bias.items()),
        "allowed_ids": list(params.allowed_token_ids or ()),
        "bad_words": [list(word) for word in request.source.bad_word_ids],
        "min_tokens": params.min_tokens,
        "stop_ids": sorted(request.stop_ids),
        "seed": request.seed,
        "choice": request.index,
        "top_logprobs": _n_logprobs(0 if scored else params.logprobs),
        "logprob_ids": list(scored or params.logprob_token_ids or ()),
        "prompt_logprobs": _n_logprobs(params.prompt_logprobs) if request.wants_prompt_logprobs else -1,
    }


def _n_logprobs(requested: int | None) -> int:
    """Return the core's value: -1 turns logprobs off, and the vocabulary limits a larger number."""
    if requested is None:
        return -1
    return TOKENS_MAX if requested == ALL_LOGPROBS else requested
