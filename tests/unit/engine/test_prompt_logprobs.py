"""Prompt logprobs: each token is scored once for any chunking, cache state and preemption."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import core
from fakes.engines import NOW, Engine
from llaisys.engine.engine_output import TokenLogprobs
from llaisys.engine.limits import PROMPT_LOGPROBS_MAX
from llaisys.errors import RejectedError
from llaisys.outputs import FinishReason

PROMPT = list(range(1, 31))


def scores(prompt: list[int]) -> list[TokenLogprobs]:
    """Return the logprobs of the fake model for each prompt token except the first."""
    return [
        TokenLogprobs(prompt[i], core.prompt_logprob(prompt[:i], prompt[i]), 1, [])
        for i in range(1, len(prompt))
    ]


def collect(made: Engine) -> dict[str, list[list[TokenLogprobs]]]:
    """Run to the end. Return the prompt logprobs of each request, one list per output."""
    collected: dict[str, list[list[TokenLogprobs]]] = {}
    while made.engine.has_work():
        for output in made.engine.step(NOW):
            if output.new_prompt_logprobs is not None:
                assert (output.index, len(output.new_token_ids)) == (0, 1)
                collected.setdefault(output.request_id, []).append(output.new_prompt_logprobs)
            if output.finish_reason is not None:
                made.ends[output.request_id, output.index] = output
            if output.last:
                made.over.add(output.request_id)
        made.engine.check()
    return collected


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("n", [1, 3])
def test_every_prompt_token_except_the_first_is_scored_once(changes: dict[str, Any], n: int) -> None:
    made = Engine(**changes)
    made.submit("a", prompt=PROMPT, prompt_logprobs=0, n=n)
    made.submit("b", prompt=PROMPT, n=n)
    assert collect(made) == {"a": [scores(PROMPT)]}
    assert len(made.ends) == 2 * n


def test_a_prompt_of_one_token_has_an_empty_list() -> None:
    made = Engine()
    made.submit("a", prompt=[5], prompt_logprobs=0)
    assert collect(made) == {"a": [[]]}


def test_a_cached_prompt_is_computed_again_and_cached_once() -> None:
    made = Engine()
    made.submit("a", prompt=PROMPT, max_tokens=1)
    made.finish()
    n_rows = made.context.n_rows
    made.submit("b", prompt=PROMPT, max_tokens=1, prompt_logprobs=0)
    assert collect(made) == {"b": [scores(PROMPT)]}
    assert made.context.n_rows == n_rows + len(PROMPT)
    made.submit("c", prompt=PROMPT, max_tokens=1)
    made.finish()
    assert made.cached["c"] == len(PROMPT) - 1
    assert made.engine.stats().kv_cells_retained == len(PROMPT)


def test_a_preempted_prompt_continues_from_the_scored_tokens() -> None:
    """Two decodes leave the prompt one token per step, until the prompt is preempted."""
    made = Engine(n_cells=96, max_model_len=64, max_num_batched_tokens=3)
    made.submit("a", prompt=[7] * 20, max_tokens=40)
    made.submit("b", prompt=[8] * 20, max_tokens=40)
    made.submit("c", prompt=PROMPT, max_tokens=10, prompt_logprobs=0)
    scored = made.engine.requests.by_ordinal[2]
    while not scored.num_preempted:
        made.step()
    assert 0 < len(scored.prompt_logprobs) < len(PROMPT) - 1
    assert collect(made) == {"c": [scores(PROMPT)]}


def test_a_non_finite_prompt_fails_only_its_request() -> None:
    made = Engine()
    made.submit("a", prompt=[1, 2, core.NON_FINITE, 4], prompt_logprobs=0)
    made.submit("b", prompt=PROMPT, prompt_logprobs=0)
    assert collect(made) == {"b": [scores(PROMPT)]}
    assert made.ends["a", 0].finish_reason is FinishReason.ERROR


def test_too_many_prompt_logprobs_are_rejected() -> None:
    made = Engine(n_cells=PROMPT_LOGPROBS_MAX, max_model_len=PROMPT_LOGPROBS_MAX)
    with pytest.raises(RejectedError, match="allowed are") as caught:
        made.submit("a", prompt=[1] * (PROMPT_LOGPROBS_MAX // 21 + 1), prompt_logprobs=20)
    assert caught.value.param == "prompt_logprobs"
