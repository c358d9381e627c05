"""Scheduler.schedule(view): budgets, batch slots, admission, preemption, expiry. No engine, no core."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.asks import ask, limits
from fakes.views import NOW, planned, request, schedule, view_of
from llaisys.engine.kv_cache_planner import LOOKAHEAD_TOKENS
from llaisys.engine.prefix_cache import PrefixCache
from llaisys.engine.request import PREEMPTIONS_MAX, Request
from llaisys.engine.request_queue import RoundRobinState, WaitingQueue
from llaisys.engine.scheduler import (
    Admission,
    ScheduledChunk,
    SchedulerOutput,
    SchedulerView,
)
from llaisys.engine.step_speed import PREFILL_TOKENS_MIN, StepSpeed


def sizes(made: SchedulerOutput) -> dict[int, int]:
    return {chunk.ordinal: chunk.n_tokens for chunk in made.chunks}


def names(made: SchedulerOutput) -> list[int]:
    return [admit.ordinal for admit in made.admit]


# --- tokens ---


def test_without_requests_the_plan_is_empty() -> None:
    assert planned([], []) == SchedulerOutput(n_free_wanted=(0,), scanned_deadlines=True)


def test_a_prompt_within_the_budget_is_one_chunk_that_samples() -> None:
    made = planned([request(1, 5)], [])
    assert (made.admit, made.chunks) == ((Admission(1),), (ScheduledChunk(1, 0, 5, True),))
    assert made.n_free_wanted == (5,)


def test_a_long_prompt_is_chunked_and_only_the_last_chunk_samples() -> None:
    assert planned([request(1, 40)], []).chunks == (ScheduledChunk(1, 0, 16, False),)
    assert planned([], [request(1, 40, computed=16)]).chunks == (ScheduledChunk(1, 16, 16, False),)
    assert planned([], [request(1, 40, computed=32)]).chunks == (ScheduledChunk(1, 32, 8, True),)


def test_decodes_come_first_and_a_long_prompt_leaves_half_of_the_budget() -> None:
    made = planned([request(4, 10)], [request(1, 40, computed=16), request(2, 3, output=2)])
    assert (made.decode, sizes(made)) == ((2,), {1: 8, 4: 7})
    made = planned([request(4, 3)], [request(1, 40, computed=16), request(2, 3, output=2)])
    assert sizes(made) == {1: 12, 4: 3}, "the long prompt uses what the other one does not need"
    made = planned([], [request(1, 40, computed=16), request(2, 3, output=2)])
    assert sizes(made) == {1: 15}


def test_a_request_is_admitted_only_with_tokens_in_the_budget() -> None:
    bounds = limits(max_num_batched_tokens=2)
    made = planned(
        [request(4, 1)], [request(1, output=1), request(2, output=1)], limits(max_num_batched_tokens=3)
    )
    assert names(made) == [4]
    made = planned([request(4, 9)], [request(1, 40, computed=1), request(2, 40, computed=1)], bounds)
    assert (names(made), sum(sizes(made).values())) == ([4], 2)


def test_long_prefill_token_threshold_bounds_a_lone_prompt() -> None:
    assert sizes(planned([request(1, 40)], [], limits(long_prefill_token_threshold=5))) == {1: 5}


def test_a_client_at_its_quota_does_not_block_other_clients() -> None:
    bounds = limits(max_client_tokens_per_step=6)
    running = [request(1, output=2, client_id="x")]
    waiting = [request(2, 9, client_id="x"), request(3, 9, client_id="x"), request(4, 9, client_id="y")]
    made = planned(waiting, running, bounds)
    assert sizes(made) == {2: 5, 4: 6}


@pytest.mark.parametrize(
    ("speed", "n_tokens"),
    [
        (StepSpeed(), 400),
        (StepSpeed(0.05, 0.001), 200),
        (StepSpeed(None, 0.001), 250),
        (StepSpeed(0.2, 0.0001), 400),
        (StepSpeed(9.0, 0.001), PREFILL_TOKENS_MIN),
        (StepSpeed(9.0, 0.0), PREFILL_TOKENS_MIN),
        (StepSpeed(0.01, 1e-309), 400),
    ],
)
def test_prefill_tokens_are_bounded_by_the_step_time(speed: StepSpeed, n_tokens: int) -> None:
    bounds = limits(max_num_batched_tokens=401, max_model_len=1000, n_cells=1000, max_step_time_s=0.25)
    long = Request(ask("1", [1] * 900), ordinal=1, seed=0, token_limit=910)
    made = schedule(view_of([long], [request(2, output=1)], bounds, speed=speed))
    assert (sizes(made), made.decode) == ({1: n_tokens}, (2,))


@pytest.mark.parametrize(("token_s", "n_tokens"), [(0.001, 400), (0.004, 250), (0.1, PREFILL_TOKENS_MIN)])
def test_a_step_without_streams_may_take_four_times_as_long(token_s: float, n_tokens: int) -> None:
    bounds = limits(max_num_batched_tokens=400, max_model_len=1000, n_cells=1000, max_step_time_s=0.25)
    long = Request(ask("1", [1] * 900), ordinal=1, seed=0, token_limit=910)
    assert sizes(schedule(view_of([long], [], bounds, speed=StepSpeed(None, token_s)))) == {1: n_tokens}


# --- batch slots ---


def test_running_requests_take_turns_in_the_batch_slots() -> None:
    running = [request(i, output=1, last_step=i % 3) for i in range(4)]
    assert planned([], running, limits(max_batch_size=2)).decode == (0, 3)
    assert planned([], running, limits(max_num_batched_tokens=2)).decode == (0, 3)


def test_a_new_request_gets_the_slot_of_the_most_recently_served() -> None:
    running = [request(i, output=1, last_step=3 - i) for i in range(2)]
    made = planned([request(5, 3)], running, limits(max_batch_size=2))
    assert (made.decode, names(made)) == ((1,), [5])
    assert made.n_free_wanted == (4,)
    made = planned([request(5, 3)], running, limits(max_batch_size=2, max_num_seqs=2))
    assert (made.decode, names(made)) == ((0, 1), [])


# --- order ---


def test_requests_are_ordered_by_priority_then_arrival() -> None:
    waiting = [request(1), request(2, priority=1), request(3, priority=-1)]
    assert names(planned(waiting, [], limits(max_num_seqs=2))) == [3, 1]
    made = planned([request(4, 20, priority=-1)], [request(1, 40, computed=4)])
    assert list(sizes(made)) == [4, 1], "the better priority gets its tokens first"


def test_later_requests_never_overtake_the_head_of_the_queue() -> None:
    small = limits(n_cells=64)
    waiting = [request(2, 40, max_tokens=24), request(3, 1, max_tokens=1)]
    assert names(planned(waiting, [request(1, 20, output=1)], small)) == []
    assert names(planned(waiting, [], small)) == [2, 3]


def test_an_overdue_request_is_admitted_first() -> None:
    waiting = [
        request(1, priority=-1, arrival_s=NOW - 1),
        request(2, arrival_s=NOW - 61),
        request(3, arrival_s=NOW - 60),
    ]
    assert names(planned(waiting, [], limits(max_num_seqs=1))) == [2]
    assert names(planned(waiting[::2], [], limits(max_num_seqs=1))) == [3]
    assert names(planned(waiting[:1], [], limits(max_num_seqs=1))) == [1]


# --- cells ---


def test_admission_leaves_lookahead_cells_for_running_requests() -> None:
    bounds = limits(n_cells=64)
    running = [request(1, 20, output=1, max_tokens=30)]  # uses 20 cells, needs 1 + 8 soon
    assert names(planned([request(2, 27, max_tokens=30)], running, bounds)) == [2]
    assert 64 - 20 - 1 - LOOKAHEAD_TOKENS == 27 + LOOKAHEAD_TOKENS
    assert names(planned([request(2, 28, max_tokens=30)], running, bounds)) == []
    assert names(planned([request(2, 34, max_tokens=1)], running, bounds)) == [2], (
        "a request needs no more cells than its token limit"
    )


def test_preempts_the_last_request_in_order_first() -> None:
    bounds = limits(n_cells=64, max_num_batched_tokens=64)
    running = [request(i, 15, output=2, max_tokens=40, priority=int(i == 1)) for i in range(4)]
    made = planned([request(9, 1)], running, bounds)
    assert (made.preempt, made.decode, made.admit) == ((1,), (0, 2, 3), ())
    assert made.n_free_wanted == (3,)


def test_the_oldest_request_is_never_preempted() -> None:
    bounds = limits(n_cells=64, max_num_batched_tokens=64)
    running = [
        request(0, 40, output=5, max_tokens=15, preempted=PREEMPTIONS_MAX),
        request(1, 5, output=1, max_tokens=20),
    ]
    made = planned([], running, bounds)
    assert (made.decode, made.preempt) == ((0, 1), ())
    tight = planned([], running, bounds, n_free=(11,))
    assert (tight.decode, tight.preempt) == ((0,), ()), "11 cells are reserved for the first request"


def test_a_reserved_request_is_admitted_only_with_its_worst_case() -> None:
    bounds = limits(n_cells=64)
    often = {"preempted": PREEMPTIONS_MAX, "max_tokens": 30}
    running = [request(0, 10, output=1, max_tokens=30)]  # uses 10 cells, needs 9 soon
    assert names(planned([request(1, 15, **often)], running, bounds)) == [1]
    assert names(planned([request(1, 16, **often)], running, bounds)) == []


def test_a_reserved_request_is_never_preempted_and_keeps_its_reservation() -> None:
    bounds = limits(n_cells=64, max_num_batched_tokens=64)
    running = [
        request(0, 15, output=2, max_tokens=40),
        request(1, 15, output=2, max_tokens=40),
        request(2, 15, output=2, max_tokens=12, preempted=PREEMPTIONS_MAX),
    ]
    made = planned([], running, bounds, n_free=(11,))
    assert (made.preempt, made.decode) == ((1,), (0, 2))


def test_cells_are_counted_by_kv_stream() -> None:
    bounds = limits(n_cells=128, n_streams=2, max_num_batched_tokens=64)
    running = [request(0, 30, output=2, max_tokens=30), request(1, 30, output=2, max_tokens=30, stream=1)]
    made = planned([request(2, 20)], running, bounds, n_free=(5, 40))
    assert made.admit == (Admission(2, stream=1, source=1),)
    assert made.n_free_wanted == (1, 21)
    made = planned([], running, bounds, n_free=(0, 40))
    assert (made.decode, made.preempt) == ((1,), ()), (
        "preempting a request in another KV stream frees no cell here"
    )


# --- deadlines and cleanup ---


def test_expired_requests_end_first_and_free_their_ids() -> None:
    late = request(1, 3, output=1, deadline_s=NOW)
    waiting = [request(2, deadline_s=NOW - 1), request(3), request(4, deadline_s=NOW + 1e-6)]
    made = planned(waiting, [late], limits(max_num_seqs=1))
    assert (made.expire, names(made)) == ((2, 1), [3])
    assert sizes(made) == {3: 3}


def test_deadlines_are_checked_once_per_scan_interval() -> None:
    late = request(1, 3, output=1, deadline_s=NOW)
    bounds = limits(timeout_scan_s=0.5)
    assert planned([], [late], bounds, last_deadline_scan_s=NOW - 0.4).expire == ()
    made = planned([], [late], bounds, last_deadline_scan_s=NOW - 0.5)
    assert (made.expire, made.scanned_deadlines) == ((1,), True)


def test_parked_requests_expire() -> None:
    made = planned([], [], parked=(request(7, deadline_s=NOW),))
    assert made.expire == (7,)


def test_cleanup_frees_the_cells_above_the_threshold() -> None:
    bounds = limits(kv_eviction_threshold=0.8, n_cells=100, kv_cleanup_interval_s=1.0)
    assert planned([], [], bounds, last_cleanup_s=NOW - 1).n_free_wanted == (20,)
    assert planned([], [], bounds, last_cleanup_s=NOW - 0.9).n_free_wanted == (0,)


# --- properties of every plan ---


@st.composite
def views(draw: st.DrawFn) -> SchedulerView:
    n_streams = draw(st.sampled_from([1, 1, 2]))
    bounds = limits(
        max_num_seqs=draw(st.integers(1, 6)),
        max_batch_size=draw(st.sampled_from([None, 1, 3])),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        n_cells=n_streams * draw(st.integers(64, 200)),
        n_streams=n_streams,
        long_prefill_token_threshold=draw(st.sampled_from([None, 3])),
        max_client_tokens_per_step=draw(st.sampled_from([None, 1, 7])),
    )
    n_free = [bounds.n_cells_per_stream] * n_streams
    running: list[Request] = []
    waiting: list[Request] = []
    for i in range(draw(st.integers(0, 12))):
        n_prompt = draw(st.integers(1, 30))
        facts = {
            "max_tokens": draw(st.integers(1, 34)),
            "priority": draw(st.integers(-1, 1)),
            "client_id": draw(st.sampled_from("xyz")),
            "deadline_s": draw(st.sampled_from([NOW, NOW + 1])),
            "arrival_s": NOW - draw(st.sampled_from([0, 61])),
            "last_step": draw(st.integers(0, 3)),
        }
        stream = draw(st.integers(0, n_streams - 1))
        each = request(i, n_prompt, **facts)
        if draw(st.booleans()) and len(running) < bounds.max_num_seqs:
            computed = draw(st.integers(0, min(n_prompt - 1, n_free[stream])))
            each = request(i, n_prompt, computed=computed, stream=stream, **facts)
            n_free[stream] -= computed
            running.append(each)
        else:
            waiting.append(each)
    drafts = {r.ordinal: draw(st.integers(1, 9)) for r in running if draw(st.booleans())}
    return view_of(waiting, running, bounds, n_free=tuple(n_free), drafts=drafts)


@given(views())
def test_every_plan_respects_all_bounds(view: SchedulerView) -> None:
    made = schedule(view)
    assert schedule(view) == made
    bounds = view.limits
    by_id = {r.ordinal: r for r in (*view.waiting, *view.running)}
    gone = set(made.expire)
    assert gone == {i for i, r in by_id.items() if r.source.deadline_s <= NOW}
    kept = [r for r in view.running if r.ordinal not in gone]
    admitted = {admit.ordinal: admit for admit in made.admit}
    # budgets: tokens, batch slots, sequence ids
    n_tokens = len(made.decode) + sum(c.n_tokens for c in made.chunks) + sum(made.drafts.values())
    assert n_tokens <= bounds.max_num_batched_tokens
    assert len(made.decode) + len(made.chunks) <= (bounds.max_batch_size or bounds.max_num_seqs)
    assert len(admitted) <= bounds.max_num_seqs - len(kept)
    for client in "xyz" if bounds.max_client_tokens_per_step else "":
        mine = [c for c in made.chunks if by_id[c.ordinal].source.client_id == client]
        assert sum(c.n_tokens for c in mine) <= (bounds.max_client_tokens_per_step or 0)
    # cells: allocated cells are available after expiry and preemption
    free = list(view.n_free)
    for i in (*made.expire, *made.preempt):
        if by_id[i] in view.running:
            free[by_id[i].state.stream] += by_id[i].num_computed  # type: ignore[union-attr]
    assert all(wanted <= n for wanted, n in zip(made.n_free_wanted, free, strict=True))
    # rows: each running or admitted request at most once, from its computed tokens on
    rows = [*made.decode, *(c.ordinal for c in made.chunks)]
    assert len(set(rows)) == len(rows)
    running_now = {r.ordinal for r in kept} - set(made.preempt) | set(admitted)
    assert set(admitted) <= set(rows) <= running_now
    for chunk in made.chunks:
        each = by_id[chunk.ordinal]
        assert chunk.start == each.num_computed
        assert 1 <= chunk.n_tokens <= (bounds.long_prefill_token_threshold or each.num_missing)
        assert chunk.samples == (chunk.n_tokens == each.num_missing)
    assert all(by_id[i].num_missing == 1 for i in made.decode)
    assert set(made.drafts) <= set(made.decode)
    assert all(1 <= n <= view.drafts[i] for i, n in made.drafts.items())
    # the oldest request is never preempted, and a step that preempts admits none
    assert not kept or kept[0].ordinal not in made.preempt
    assert not (made.preempt and made.admit)
    # progress guarantee: open requests mean that some row is computed
    assert bool(rows) == bool(set(by_id) - gone)


# --- edges: full batch slots, the last id, the last cell, requests without cells ---


def test_all_running_prompts_get_a_chunk() -> None:
    made = planned([], [request(i, 20, computed=4) for i in (1, 2, 3)], limits(max_num_batched_tokens=60))
    assert sizes(made) == {1: 16, 2: 16, 3: 16}
    assert made.n_free_wanted == (48,)


def test_running_prompts_keep_their_batch_slots() -> None:
    bounds = limits(max_batch_size=3, max_num_batched_tokens=60)
    made = planned([request(8), request(9)], [request(i, 20, computed=4) for i in (1, 2)], bounds)
    assert (names(made), sorted(sizes(made))) == ([8], [1, 2, 8])


def test_admission_is_bounded_by_free_sequence_ids() -> None:
    running, waiting = [request(i, output=1) for i in (1, 2)], [request(i) for i in (7, 8, 9)]
    for n_ids in (2, 3, 4, 5):
        made = planned(waiting, running, limits(max_num_seqs=n_ids, max_num_batched_tokens=60))
        assert names(made) == [7, 8, 9][: n_ids - 2]


def test_a_step_that_preempts_admits_no_request() -> None:
    bounds = limits(n_cells=64, max_num_batched_tokens=64, max_num_seqs=8)
    running = [request(i, 15, output=2, max_tokens=40) for i in range(4)]
    made = planned([request(9, 1, max_tokens=1, priority=-1)], running, bounds)
    assert (made.preempt, made.admit) == ((3,), ())


def test_the_last_free_cell_is_allocated() -> None:
    running = [request(i, 15, output=2, max_tokens=40) for i in range(2)]
    for n_free, preempted, short in ((2, (), ()), (1, (), (1,)), (0, (1,), ())):
        made = planned([], running, limits(n_cells=64), n_free=(n_free,))
        assert (made.preempt, made.without_cells) == (preempted, short)


def test_a_slot_goes_to_a_request_that_can_progress() -> None:
    """There is one slot and no free cell. The last request is next, but it may not preempt an older one."""
    running = [request(i, 15, output=2, max_tokens=40, last_step=9 - i) for i in range(3)]
    made = planned([], running, limits(n_cells=64, max_batch_size=1), n_free=(0,))
    assert (made.decode, made.preempt, made.without_cells) == ((0,), (2,), ())


def test_a_slot_goes_to_a_request_with_reserved_cells() -> None:
    running = [
        request(0, 15, output=2, max_tokens=40, last_step=9),
        request(1, 15, output=2, max_tokens=4, last_step=8, preempted=PREEMPTIONS_MAX),
        request(2, 15, output=2, max_tokens=4, last_step=7, preempted=PREEMPTIONS_MAX),
    ]
    made = planned([], running, limits(n_cells=64, max_batch_size=1), n_free=(6,))
    assert (made.decode, made.without_cells) == ((2,), ())
    running = [running[0], running[1], request(3, 15, output=2, max_tokens=40, last_step=1)]
    made = planned([], running, limits(n_cells=64, max_batch_size=1), n_free=(3,))
    assert (made.decode, made.preempt, made.without_cells) == ((1,), (), ())


def test_requests_without_cells_are_reported() -> None:
    bounds = limits(n_cells=64)
    waiting = [request(2, 40, max_tokens=24), request(3, 1, max_tokens=1)]
    assert planned(waiting, [request(1, 20, output=1)], bounds).without_cells == (2,)
    assert planned(waiting[1:], [request(1, 20, output=1)], bounds).without_cells == ()
    running = [request(0, 15, output=2, max_tokens=40), request(1, 15, output=2, preempted=PREEMPTIONS_MAX)]
    made = planned(waiting, running, bounds, n_free=(9,))
    assert made.without_cells == (0, 2)


def test_two_prompts_share_the_token_budget() -> None:
    bounds = limits(max_num_batched_tokens=40, max_client_tokens_per_step=100)
    assert sizes(planned([request(1, 30), request(2, 30)], [], bounds)) == {1: 20, 2: 20}


def test_a_client_new_to_the_step_has_its_whole_quota() -> None:
    bounds = limits(max_client_tokens_per_step=6)
    assert sizes(planned([request(2, 9, client_id="x")], [], bounds)) == {2: 6}


def test_a_plan_keeps_the_round_robin_state_and_reports_its_cleanup() -> None:
    fair = RoundRobinState((((0, "x"), 5), ((0, "y"), 3)))
    made = planned([], [request(1, output=1)], round_robin=fair, last_cleanup_s=NOW - 5)
    assert (made.round_robin, made.cleaned_cache) == (fair, True)
    assert not planned([], [], last_cleanup_s=NOW).cleaned_cache


def test_a_client_is_charged_for_computed_not_for_cached_tokens() -> None:
    index = PrefixCache()
    index.unpin(index.insert("", [1] * 8)[0])
    waiting = [request(i, 10, client_id="xxxy"[i]) for i in range(4)]
    made = planned(waiting, [], limits(max_num_seqs=2), prefix_cache=index)
    assert [(admit.ordinal, admit.n_cached) for admit in made.admit] == [(0, 8), (1, 8)]
    assert made.round_robin == RoundRobinState((((0, "x"), 16 - 2 - 2), ((0, "y"), 0)))


def test_queue_without_some_requests_keeps_the_others() -> None:
    queue = WaitingQueue()
    made = [request(i, client_id="xyx"[i % 3]) for i in range(6)]
    for each in made:
        queue.add(each)
    others = queue.without(made[:1])
    assert (len(others), [r.ordinal for r in others]) == (5, [1, 2, 3, 4, 5])
    assert len(queue) == 6


def test_charge_of_zero_tokens_or_a_lone_client_changes_nothing() -> None:
    fair = RoundRobinState((((0, "x"), 5), ((0, "y"), 3)))
    one = request(1, client_id="x")
    assert fair.charge(one, 1) == RoundRobinState((((0, "x"), 4), ((0, "y"), 3)))
    assert fair.charge(one, 0) is fair
    alone = RoundRobinState((((0, "x"), 5),))
    assert alone.charge(one, 3) is alone
