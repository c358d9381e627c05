"""Drafts get what a step leaves: tokens of its budget and free cells."""

from __future__ import annotations

from fakes.asks import limits
from fakes.views import planned, request
from llaisys.engine.prefix_cache import PrefixCache
from llaisys.engine.request import PREEMPTIONS_MAX


def test_drafts_get_the_rest_of_the_token_budget_and_of_the_free_cells() -> None:
    running = [request(1, output=2), request(2, output=2)]
    made = planned([], running, drafts={1: 4, 2: 4})
    assert (made.decode, made.drafts) == ((1, 2), {1: 4, 2: 4})
    assert planned([], running, limits(max_num_batched_tokens=7), drafts={1: 4, 2: 4}).drafts == {1: 4, 2: 1}
    assert planned([], running, n_free=(5,), drafts={1: 4, 2: 4}).drafts == {1: 3}
    bounds = limits(max_client_tokens_per_step=3)
    assert planned([], running, bounds, drafts={1: 4}).drafts == {1: 1}, "two tokens of the client decode"


def test_drafts_delay_no_prompt_and_evict_nothing() -> None:
    running = [request(1, output=2)]
    assert planned([request(2, 5)], running, drafts={1: 4}).drafts == {}
    assert planned([], [*running, request(2, 40, computed=16)], drafts={1: 4}).drafts == {}
    cache = PrefixCache(1)
    pin, _ = cache.insert("", [9] * 20, 0)
    cache.unpin(pin)
    made = planned([], running, n_free=(3,), prefix_cache=cache, drafts={1: 4})
    assert (made.drafts, made.n_free_wanted) == ({1: 2}, (3,))


def test_drafts_use_no_reserved_cells() -> None:
    reserved = request(1, output=2, preempted=PREEMPTIONS_MAX, max_tokens=6)
    running = [reserved, request(2, output=2)]
    made = planned([], running, n_free=(8,), drafts={2: 8})
    n_reserved = reserved.token_limit - reserved.num_computed
    assert made.drafts == {2: 8 - n_reserved - 1}


def test_a_step_that_preempts_has_no_drafts() -> None:
    running = [request(1, output=2), request(2, output=2)]
    made = planned([], running, n_free=(0,), drafts={1: 4, 2: 4})
    assert (made.preempt, made.drafts) == ((2,), {})
