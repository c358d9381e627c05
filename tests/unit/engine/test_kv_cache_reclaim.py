"""Models with a sliding window in every layer: cells behind the window are reclaimed, tokens never change.

The fake core rejects a row that lacks a visible cell; `Engine` checks the invariants after every step.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import core
from fakes.engines import Engine
from llaisys.engine.kv_cache_planner import RECLAIM_TOKENS

WINDOW = 20
STEP = 16
# The most cells of one request: its window, those not reclaimed yet, and the tokens of a step.
CELLS_MAX = WINDOW + RECLAIM_TOKENS + STEP


def windowed(window: int | None = WINDOW, **changes: Any) -> Engine:
    return Engine(window=window, **{"max_model_len": 400, "n_cells": 400, **changes})


def prompt(n: int, seed: int = 0) -> list[int]:
    return [(7 * i + seed) % 200 for i in range(n)]


def run(made: Engine) -> int:
    """Run to the end. Return the largest number of used cells; evictable cells do not count."""
    n_used = 0
    while made.engine.has_work():
        made.step()
        n_used = max(n_used, made.engine.stats().kv_cells_used)
    made.finish()
    return n_used


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n_prompt", [1, 10, STEP, WINDOW + 1, 90, 230])
def test_used_cells_stay_within_the_window_for_any_length(n_prompt: int, caching: bool) -> None:
    made = windowed(enable_prefix_caching=caching)
    made.submit("a", prompt=prompt(n_prompt), max_tokens=150)
    pinned = WINDOW if caching else 0  # a cached prompt stays until the window has passed it
    assert run(made) <= CELLS_MAX + pinned
    assert made.tokens["a"] == core.answer(prompt(n_prompt), 150, window=WINDOW)


def test_without_a_window_no_cell_is_reclaimed() -> None:
    made = windowed(window=None)
    made.submit("a", prompt=prompt(90), max_tokens=150)
    assert run(made) == 90 + 148, "the step that ends it frees all cells"


def test_cells_are_reclaimed_in_batches_and_none_too_early() -> None:
    made = windowed(enable_prefix_caching=False)
    made.submit("a", prompt=prompt(1), max_tokens=200)
    (request,) = made.engine.requests.by_ordinal.values()
    n_reclaimed = set()
    while made.engine.has_work():
        made.step()
        n_reclaimed.add(request.num_reclaimed)
    assert n_reclaimed == {0, 64, 128}, "200 tokens, of which the last 20 are visible"


def test_a_cached_prompt_stays_cached_and_evictable() -> None:
    made = windowed()
    made.submit("a", prompt=prompt(STEP), max_tokens=100)
    run(made)
    assert made.engine.stats().kv_cells_retained == STEP, "the cells of the prompt stay cached"
    made.submit("b", prompt=prompt(STEP), max_tokens=100)
    run(made)
    assert made.cached == {"a": 0, "b": STEP - 1}
    assert made.tokens["a"] == made.tokens["b"]


def test_a_pinned_prompt_behind_the_window_becomes_evictable() -> None:
    made = windowed()
    made.submit("a", prompt=prompt(STEP), max_tokens=150)
    made.step(100)
    stats = made.engine.stats()
    assert (stats.num_running, stats.kv_cells_retained) == (1, STEP)
    assert stats.kv_cells_used < stats.kv_cells - stats.kv_cells_free, "the cells of the prompt are evictable"
    made.submit("b", prompt=prompt(300, 5), max_tokens=10)
    run(made)
    assert made.tokens["a"] == core.answer(prompt(STEP), 150, window=WINDOW)


def test_a_sequence_without_its_first_cells_is_not_cached() -> None:
    made = windowed()
    made.submit("a", prompt=prompt(200), max_tokens=5)
    run(made)
    assert made.engine.stats().kv_cells_retained == 0
    made.submit("b", prompt=prompt(200), max_tokens=5)
    run(made)
    assert made.cached["b"] == 0
    assert made.tokens["a"] == made.tokens["b"] == core.answer(prompt(200), 5, window=WINDOW)


@pytest.mark.parametrize("caching", [True, False])
def test_concurrent_requests_may_have_more_tokens_than_cells(caching: bool) -> None:
    made = windowed(n_cells=500, max_model_len=400, enable_prefix_caching=caching)
    for i in range(4):
        made.submit(f"r{i}", prompt=prompt(300, i), max_tokens=60)
    n_together = 0
    while made.engine.has_work():
        made.step()
        n_together = max(n_together, made.engine.stats().num_running)
    made.finish()
    assert n_together == 4, "1,440 tokens fit in 500 cells"
    assert made.engine.stats().num_preempted == 0
    for i in range(4):
        assert made.tokens[f"r{i}"] == core.answer(prompt(300, i), 60, window=WINDOW)


def test_a_request_preempted_after_reclaiming_is_recomputed() -> None:
    made = windowed(100, n_cells=256, max_model_len=256, max_num_seqs=3)
    made.submit("late", prompt=prompt(5), max_tokens=240)
    made.step(160)
    (late,) = made.engine.requests.running
    assert late.num_reclaimed == 64
    made.submit("a", prompt=prompt(6, 3), max_tokens=240, priority=-1)
    made.submit("b", prompt=prompt(7, 9), max_tokens=240, priority=-1)
    for _ in range(60):  # before it reclaims more cells
        if not late.num_preempted:
            assert late.num_reclaimed == 64
            made.step()
    assert (late.num_preempted, late.num_reclaimed, late.num_computed) == (1, 0, 0)
    made.finish()
    for i, name in enumerate(("late", "a", "b")):
        assert made.tokens[name] == core.answer(prompt(5 + i, (0, 3, 9)[i]), 240, window=100)


@pytest.mark.parametrize("caching", [True, False])
def test_choices_fork_before_the_prompt_is_reclaimed(caching: bool) -> None:
    made = windowed(max_num_seqs=3, enable_prefix_caching=caching)
    made.submit("a", prompt=prompt(100), n=3, temperature=1.0, seed=5, max_tokens=150)
    run(made)
    for i in range(3):
        spec = core.SamplerSpec(temperature=1.0, seed=5, choice=i)
        want = core.answer(prompt(100), 150, spec, WINDOW)
        assert made.tokens[("a", i) if i else "a"] == want
    assert made.context.n_rows == 100 + 2 + 3 * 149, "the prompt is computed once"


@settings(max_examples=60)
@given(st.data())
def test_tokens_equal_those_of_a_lone_request(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 90))
    n_streams = data.draw(st.sampled_from([1, 1, 2]))
    n_cells = n_streams * data.draw(st.integers(160, 260))
    made = windowed(
        window,
        n_cells=n_cells,
        max_model_len=160,
        n_streams=n_streams,
        enable_prefix_caching=data.draw(st.booleans()),
        max_num_batched_tokens=data.draw(st.sampled_from([5, 16, 64])),
        max_num_queued_reqs=50,
    )
    submitted = {}
    for i in range(data.draw(st.integers(1, 8))):
        # Some prompts share a prefix.
        text = prompt(data.draw(st.integers(1, 100)), data.draw(st.integers(0, 2)))
        n_tokens, n = data.draw(st.integers(1, 160 - len(text))), data.draw(st.sampled_from([1, 1, 2, 3]))
        made.submit(f"r{i}", prompt=text, max_tokens=n_tokens, n=n, temperature=1.0, seed=i)
        submitted[f"r{i}"] = text, n_tokens, n
        made.step(data.draw(st.integers(0, 60)))
        if data.draw(st.integers(0, 9)) == 0:
            made.engine.cancel(f"r{i}")
            del submitted[f"r{i}"]
    made.finish()
    for name, (text, n_tokens, n) in submitted.items():
        for index in range(n):
            spec = core.SamplerSpec(temperature=1.0, seed=int(name[1:]), choice=index)
            got = made.tokens[(name, index) if index else name]
            assert got == core.answer(text, n_tokens, spec, window), (name, index)
