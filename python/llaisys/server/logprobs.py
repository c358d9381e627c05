"""Checks the numbers of logprobs that a body asks for, and divides long lists of them into chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from llaisys.async_llm import AsyncLLM
from llaisys.outputs import Logprob, RequestOutput
from llaisys.sampling_params import count_logprobs

# Candidates in one chunk of a prompt's logprobs. They take about 40 ms of the event loop.
ENTRIES_PER_CHUNK = 4096
# Candidates of one token, its own included, that the default of `max_logprobs` allows.
FEW_ENTRIES = 21
_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs")


def resolve_logprobs(body: BaseModel, engine: AsyncLLM) -> None:
    """Replace -1 by the size of the vocabulary, in place. Raises RejectedError above `max_logprobs`."""
    for name in _FIELDS:
        value = getattr(body, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            n = count_logprobs(name, value, engine.config.max_logprobs, engine.model_info.vocab_size)
            setattr(body, name, n)


def has_many_logprobs(delta: RequestOutput) -> bool:
    """Return True if the tokens of the delta have more than FEW_ENTRIES candidates each."""
    return any(len(output.logprobs[0]) > FEW_ENTRIES for output in delta.outputs if output.logprobs)


def tokens_per_chunk(given: Sequence[Mapping[int, Logprob] | None], n_max: int) -> int:
    """Return how many tokens of a prompt's logprobs form one chunk: up to `n_max`, at least one."""
    n_entries = len(given[1] or ()) if len(given) > 1 else 1
    return max(1, min(n_max, ENTRIES_PER_CHUNK // max(1, n_entries)))
