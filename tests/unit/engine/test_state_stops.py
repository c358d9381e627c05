"""Where chunks of a prompt end for recurrent states, and which of them are kept."""

from __future__ import annotations

import pytest

from fakes.asks import ask, limits
from llaisys.engine.prefix_cache import PrefixCache
from llaisys.engine.request import Request, Running
from llaisys.engine.request_queue import WaitingQueue
from llaisys.engine.scheduler import Scheduler, SchedulerOutput, SchedulerView
from llaisys.engine.state_stops import keeps_state, next_stop, state_stops


def request(n_prompt: int) -> Request:
    return Request(ask("r", [1] * n_prompt, max_tokens=1), 0, 0, n_prompt + 1)


@pytest.mark.parametrize(
    ("n_prompt", "n_cached", "n_same", "stops"),
    [
        (300, 0, 0, (284,)),
        (300, 200, 200, (284,)),
        (300, 221, 221, ()),  # saves fewer than 64 tokens
        (300, 100, 250, (250, 284)),
        (300, 100, 163, (284,)),
        (300, 0, 299, (284, 299)),
        (79, 0, 0, ()),
        (80, 0, 0, (64,)),
    ],
)
def test_chunks_end_where_a_later_request_can_continue(
    n_prompt: int, n_cached: int, n_same: int, stops: tuple[int, ...]
) -> None:
    assert state_stops(request(n_prompt), n_cached, n_same) == stops


def test_the_next_stop_is_after_the_position() -> None:
    assert [next_stop((5, 9), at) for at in (0, 5, 8, 9)] == [5, 9, 9, None]


def test_states_of_a_long_prompt_are_kept_at_stops_and_at_wide_distances() -> None:
    made = request(16_384)
    made.state_stops = (100, 16_368)
    kept = []
    for computed in range(100, 16_384, 100):
        made.num_computed = computed
        if keeps_state(made):
            kept.append(computed)
            made.num_shared = computed
    assert kept == [100, *range(2200, 16_384, 2100)], "an eighth of the prompt, rounded up to ends of chunks"
    short = request(1024)
    short.num_computed = 511
    assert not keeps_state(short)
    short.num_computed = 512
    assert keeps_state(short)


def planned(index: PrefixCache, n_states_kept: int, *, running: Request | None = None) -> SchedulerOutput:
    """Return a plan in which a prompt of 120 tokens waits or runs."""
    bounds = limits(max_model_len=200, max_num_batched_tokens=128, state_bytes=1, n_states_kept=n_states_kept)
    waiting = WaitingQueue()
    if running is None:
        waiting.add(request(120))
    view = SchedulerView(
        now_s=1000.0,
        waiting=waiting,
        running=[] if running is None else [running],
        limits=bounds,
        n_free=(256,),
        prefix_cache=index,
    )
    return Scheduler().schedule(view)


def test_the_scheduler_ends_chunks_at_stops() -> None:
    plan = planned(PrefixCache(1, 4), 4)
    assert plan.admit[0].state_stops == (104,)
    assert [(c.start, c.n_tokens, c.samples) for c in plan.chunks] == [(0, 104, False)]
    running = request(120)
    running.state, running.num_computed, running.state_stops = Running(0), 50, (104,)
    plan = planned(PrefixCache(1, 4), 4, running=running)
    assert [(c.start, c.n_tokens, c.samples) for c in plan.chunks] == [(50, 54, False)]
    running.num_computed = 104
    plan = planned(PrefixCache(1, 4), 4, running=running)
    assert [(c.start, c.n_tokens, c.samples) for c in plan.chunks] == [(104, 16, True)]


def test_a_chunk_ends_where_cached_tokens_without_a_state_end() -> None:
    index = PrefixCache(1, 4)
    pin, _ = index.insert("", [1] * 70 + [2])
    index.unpin(pin)
    plan = planned(index, 4)
    assert (plan.admit[0].n_cached, plan.admit[0].state_stops) == (0, (70, 104))
    assert [(c.start, c.n_tokens) for c in plan.chunks] == [(0, 70)]


def test_without_kept_states_a_prompt_has_no_stops() -> None:
    plan = planned(PrefixCache(1, 0), 0)
    assert plan.admit[0].state_stops == ()
    assert [(c.start, c.n_tokens, c.samples) for c in plan.chunks] == [(0, 120, True)]
