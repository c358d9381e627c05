"""The planner adds drafts only where they raise the expected tokens per second."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llaisys.engine.spec_decode.planner import ROWS_MAX, Acceptance, CostCurve, DraftPlanner, monotone


def curve(seconds: Callable[[int], float]) -> CostCurve:
    return CostCurve({n: seconds(n) for n in range(1, ROWS_MAX + 1)})


FLAT, PROPORTIONAL = (lambda _: 1.0), float


def planner(seconds: Callable[[int], float], acceptance: dict[int, tuple[float, float]]) -> DraftPlanner:
    made = DraftPlanner(curve(seconds))
    for ordinal, (first, later) in acceptance.items():
        made._of_request[ordinal] = Acceptance(first, later)
    return made


def test_free_rows_take_every_draft_up_to_the_bound() -> None:
    made = planner(FLAT, {1: (0.9, 0.9), 2: (0.5, 0.9)})
    assert made.plan(2, {1: 3, 2: 4}) == {1: 3, 2: 4}
    assert sum(made.plan(2, {1: 16, 2: 16}).values()) == ROWS_MAX - 2


def test_rows_that_cost_as_much_as_steps_take_no_draft() -> None:
    assert planner(PROPORTIONAL, {1: (1.0, 1.0)}).plan(1, {1: 8}) == {}


def test_the_better_request_gets_the_drafts() -> None:
    made = planner(lambda n: 1 + 0.3 * (n - 1), {1: (0.2, 0.9), 2: (0.95, 0.95)})
    planned = made.plan(2, {1: 4, 2: 4})
    assert 1 not in planned
    assert planned[2] > 1


def test_a_step_without_gain_in_the_middle_is_crossed() -> None:
    """Rows 5 to 8 cost the same (a full vector), so three drafts lose and seven win."""
    made = planner(lambda n: (1.0, 3.5)[n > 2], {1: (1.0, 1.0)})
    assert made.plan(1, {1: 1}) == {1: 1}
    assert made.plan(1, {1: 2}) == {1: 1}
    assert made.plan(1, {1: 15}) == {1: 15}


def test_drafts_that_take_time_to_propose_must_pay_for_it() -> None:
    made = planner(FLAT, {1: (0.9, 0.9)})
    assert made.plan(1, {1: 4}, seconds_per_draft=0.1) == {1: 4}
    assert made.plan(1, {1: 4}, seconds_per_draft=2.0) == {}
    both = planner(FLAT, {1: (0.6, 0.9), 2: (0.6, 0.9)})
    assert both.plan(2, {1: 1, 2: 1}, seconds_per_draft=0.4) == {1: 1, 2: 1}, "one decode drafts for both"
    assert both.plan(1, {1: 1}, seconds_per_draft=0.6) == {}


def test_no_drafts_without_proposals_and_at_many_requests() -> None:
    made = planner(FLAT, {})
    assert made.plan(1, {}) == {}
    assert made.plan(ROWS_MAX, {1: 4}) == {}
    assert made.plan(0, {1: 4}) == {}


def test_acceptance_falls_and_recovers_from_unused_proposals() -> None:
    made = planner(lambda n: 1 + 0.4 * (n - 1), {})
    for _ in range(20):
        made.observe_drafts(1, [5, 6, 7], [4])
    assert made.plan(1, {1: 3}) == {}
    for _ in range(20):
        made.observe_drafts(1, [5, 6, 7], [5])
    assert made.plan(1, {1: 3})


def test_a_new_request_starts_with_the_acceptance_of_all() -> None:
    made = planner(lambda n: 1 + 0.4 * (n - 1), {})
    for ordinal in range(100):
        made.observe_drafts(ordinal, [5], [4])
        made.finish(ordinal)
    assert made.acceptance(1000).first < 0.2
    assert len(made._of_request) == 1


def test_later_drafts_are_compared_only_after_accepted_ones() -> None:
    acceptance = Acceptance(0.5, 0.8)
    acceptance.observe(0, 4, 0.5)
    assert (acceptance.first, acceptance.later) == (0.25, 0.8)
    acceptance.observe(2, 4, 0.5)
    assert acceptance.first == 0.625
    assert acceptance.later == pytest.approx(0.45)  # one accepted, one rejected
    acceptance.observe(0, 0, 0.5)
    assert acceptance.first == 0.625
    assert acceptance.gains(2) == [0.625, 0.625 * acceptance.later]


# --- the cost curve ---


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
def test_monotone_is_the_closest_sequence_that_never_falls(values: list[float]) -> None:
    fitted = monotone(values)
    assert all(a <= b for a, b in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))
    error = sum((a - b) ** 2 for a, b in zip(fitted, values, strict=True))
    rng = random.Random(0)
    for _ in range(20):
        other = sorted(value + rng.gauss(0, 0.3) for value in fitted)
        assert error <= sum((a - b) ** 2 for a, b in zip(other, values, strict=True)) + 1e-9


def test_a_curve_interpolates_and_extrapolates() -> None:
    made = CostCurve({1: 1.0, 8: 8.0})
    assert [made.seconds(n) for n in (1, 4, 8, 16)] == pytest.approx([1, 4, 8, 16])
    assert CostCurve({1: 2.0}).seconds(16) == 2.0


def test_a_curve_follows_the_machine() -> None:
    """Twice as slow in steps of one row: the other row counts follow."""
    made = CostCurve({1: 1.0, 8: 2.0})
    for _ in range(200):
        made.observe(1, 2.0)
    assert made.seconds(1) == pytest.approx(2.0, rel=0.05)
    assert 3.0 < made.seconds(8) < 5.0
    made.observe(0, 1.0)
    made.observe(ROWS_MAX + 1, 1.0)


def test_one_slow_step_changes_little() -> None:
    made = CostCurve({1: 1.0, 8: 2.0})
    made.observe(1, 1000.0)
    assert made.seconds(1) < 1.5
