"""n > 1: the prompt is computed once; each choice has its own random numbers and finish reason."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import core
from fakes.engines import Engine
from llaisys.errors import QueueFullError
from llaisys.outputs import FinishReason

PROMPT = list(range(1, 31))


def tokens_of_choices(n: int, seed: int = 5, n_tokens: int = 10) -> dict[Any, list[int]]:
    """Return the tokens of each choice when it runs alone."""
    specs = [core.SamplerSpec(temperature=1.0, seed=seed, choice=i) for i in range(n)]
    return {("a", i) if i else "a": core.answer(PROMPT, n_tokens, specs[i]) for i in range(n)}


def sampled(n: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "n": n, "temperature": 1.0, "seed": 5, **changes}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n_streams", [1, 2])
def test_choices_share_the_prompt_cells_which_are_computed_once(caching: bool, n_streams: int) -> None:
    made = Engine(enable_prefix_caching=caching, n_streams=n_streams)
    made.submit("a", **sampled(4))
    made.step(2)
    assert made.engine.stats().waiting_by_reason["sibling"] == 0
    assert made.engine.stats().num_waiting == 3
    made.finish()
    assert made.tokens == tokens_of_choices(4)
    assert made.context.n_rows == 30 + 3 + 4 * 9, "three choices compute the last prompt token again"
    assert made.cached["a"] == 0


@pytest.mark.parametrize("caching", [True, False])
def test_choices_wait_when_cells_are_scarce(caching: bool) -> None:
    made = Engine(max_num_seqs=2, n_cells=64, enable_prefix_caching=caching, max_num_queued_reqs=20)
    made.submit("a", **sampled(2))
    made.submit("b", prompt=[9] * 20, max_tokens=30)
    made.submit("c", prompt=[8] * 20, max_tokens=30)
    made.finish()
    assert {key: made.tokens[key] for key in tokens_of_choices(2)} == tokens_of_choices(2)
    assert made.tokens["b"] == core.answer([9] * 20, 30)


@pytest.mark.parametrize("n_last", [1, 2])
def test_siblings_start_with_the_first_token_for_any_size_of_the_last_chunk(n_last: int) -> None:
    """A prompt that lacks one token is scheduled as a decode; siblings still start when it ends."""
    made = Engine(max_num_batched_tokens=30 - n_last)
    made.submit("x", prompt=PROMPT[:6], max_tokens=1)
    made.finish()
    made.submit("a", **sampled(3, prompt=[*PROMPT[:6], *range(50, 80 - n_last), *[90] * n_last]))
    made.step(3)
    assert made.engine.stats().num_running == 3
    made.finish()
    assert made.cached["a"] == 6


def test_each_choice_ends_once_and_one_output_is_the_last() -> None:
    made = Engine()
    want = tokens_of_choices(3)
    made.submit("a", **sampled(3, stop_token_ids=[want["a", 1][4]]))
    made.finish()
    stop = want["a", 1][4]
    for key, tokens in want.items():
        cut = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert made.tokens[key] == cut
        assert made.ends[key].finish_reason is (FinishReason.STOP if stop in tokens else FinishReason.LENGTH)
    assert sum(end.last for end in made.ends.values()) == 1


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5])
def test_canceling_one_choice_leaves_the_others(n_steps: int) -> None:
    made = Engine()
    made.submit("a", **sampled(3))
    made.step(n_steps)
    made.engine.cancel("a", 0)
    made.engine.cancel("a", 0)
    made.finish()
    want = tokens_of_choices(3)
    assert made.reasons()["a"] is FinishReason.ABORT
    assert made.tokens.get("a", []) == want["a"][: len(made.tokens.get("a", []))]
    assert made.tokens["a", 1] == want["a", 1]
    assert made.tokens["a", 2] == want["a", 2]


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5])
def test_canceling_a_request_ends_all_its_choices(n_steps: int) -> None:
    made = Engine()
    made.submit("a", **sampled(3))
    made.step(n_steps)
    made.engine.cancel("a")
    made.finish()
    assert list(made.reasons().values()) == [FinishReason.ABORT] * 3


def test_a_deadline_ends_all_choices() -> None:
    made = Engine(max_num_seqs=3)
    made.submit("a", **sampled(3, deadline_s=1001.0))
    made.step(2)
    made.step(1, 1001.0)
    assert list(made.reasons().values()) == [FinishReason.TIMEOUT] * 3


def test_a_faulty_prompt_fails_every_choice() -> None:
    made = Engine()
    made.submit("a", **sampled(3, prompt=[1, core.NON_FINITE]))
    made.finish()
    assert list(made.reasons().values()) == [FinishReason.ERROR] * 3


def test_the_queue_counts_requests_not_choices() -> None:
    made = Engine(max_num_seqs=4, max_num_queued_reqs=1)
    made.submit("a", **sampled(4))
    made.step(3)
    assert made.engine.stats().num_running == 4
    made.submit("b", **sampled(4))
    with pytest.raises(QueueFullError, match="1 requests wait; the limit is"):
        made.submit("c")
    made.finish()
    assert set(made.over) == {"a", "b"}


def test_the_engine_seed_gives_each_choice_different_tokens() -> None:
    made = Engine(seed=3)
    made.submit("a", prompt=PROMPT, n=3, temperature=1.0)
    made.finish()
    assert len({tuple(tokens) for tokens in made.tokens.values()}) == 3
