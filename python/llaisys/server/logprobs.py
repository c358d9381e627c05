"""Checks the numbers of logprobs that a body asks for."""

from __future__ import annotations

from pydantic import BaseModel

from llaisys.async_llm import AsyncLLM
from llaisys.sampling_params import count_logprobs

_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs")


def resolve_logprobs(body: BaseModel, engine: AsyncLLM) -> None:
    """Replace -1 by the size of the vocabulary, in place. Raises RejectedError above `max_logprobs`."""
    for name in _FIELDS:
        value = getattr(body, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            n = count_logprobs(name, value, engine.config.max_logprobs, engine.model_info.vocab_size)
            setattr(body, name, n)
