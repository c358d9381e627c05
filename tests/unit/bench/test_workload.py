"""Benchmark workloads: prompts and arrival times depend only on the seed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from llaisys.bench.workload import Workload, arrival_times


@pytest.mark.parametrize(
    "workload",
    [
        Workload(num_prompts=5, input_len=20, output_len=4, range_ratio=0.5),
        Workload(dataset="prefix_repetition", num_prompts=6, prefix_len=8, suffix_len=4, num_prefixes=3),
        Workload(dataset="chat", num_prompts=6, turns=3, input_len=5),
    ],
)
def test_a_seed_determines_the_workload(workload: Workload) -> None:
    assert workload.draw(3) == workload.draw(3)
    assert workload.draw(3) != workload.draw(4)


def test_random_lengths_are_within_the_ratio() -> None:
    drawn = Workload(num_prompts=300, input_len=100, output_len=10, range_ratio=0.2, vocab_size=1000).draw(0)
    lengths = {len(turn.prompt) for (turn,) in drawn}
    assert min(lengths) == 80
    assert max(lengths) == 120
    assert {turn.output_len for (turn,) in drawn} == {8, 9, 10, 11, 12}
    ids = [i for (turn,) in drawn for i in turn.prompt]
    assert min(ids) >= 100
    assert max(ids) < 1000


def test_without_a_ratio_lengths_are_exact_and_a_prefix_is_shared() -> None:
    drawn = Workload(num_prompts=4, input_len=16, output_len=3, prefix_len=8).draw(0)
    assert {len(turn.prompt) for (turn,) in drawn} == {24}
    assert len({tuple(turn.prompt[:8]) for (turn,) in drawn}) == 1
    assert len({tuple(turn.prompt[8:]) for (turn,) in drawn}) == 4


def test_prefixes_are_repeated_evenly() -> None:
    drawn = Workload(
        dataset="prefix_repetition", num_prompts=12, prefix_len=10, suffix_len=5, num_prefixes=3
    ).draw(0)
    prefixes = [tuple(turn.prompt[:10]) for (turn,) in drawn]
    assert sorted(map(prefixes.count, set(prefixes))) == [4, 4, 4]
    assert prefixes != sorted(prefixes, key=prefixes.index)  # shuffled, not one prefix after the other
    assert {len(turn.prompt) for (turn,) in drawn} == {15}


def test_conversations_are_complete_and_text() -> None:
    drawn = Workload(dataset="chat", num_prompts=7, turns=3, input_len=6).draw(0)
    assert [len(conversation) for conversation in drawn] == [3, 3, 3]
    assert all(len(str(turn.prompt).split()) == 6 for each in drawn for turn in each)


def test_an_infinite_rate_sends_all_requests_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_arrivals_replay_from_the_seed_and_keep_the_rate() -> None:
    times = arrival_times(1000, 20.0, 1.0, 7)
    assert times == arrival_times(1000, 20.0, 1.0, 7)
    assert times != arrival_times(1000, 20.0, 1.0, 8)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_spread_of_the_burstiness(burstiness: float) -> None:
    """A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).

    For 20,000 gaps its standard error is below 2 %, so the tolerance of 8 % is four standard errors.
    """
    gaps = np.diff(arrival_times(20_000, 5.0, burstiness, 1))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.08)


def test_infinite_burstiness_gives_constant_gaps() -> None:
    times = arrival_times(5, 4.0, math.inf, 0)
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {0.25}
