"""KvCachePlanner: allocatable cells, worst-case reservations, freed cells and the choice of a KV stream."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.asks import ask
from llaisys.engine.kv_cache_planner import KvCachePlanner, Placement
from llaisys.engine.prefix_cache import PrefixCache
from llaisys.engine.request import PREEMPTIONS_MAX, BrokenInvariant, Request, Running


def request(
    ordinal: int,
    prompt: list[int],
    *,
    computed: int = 0,
    reserved: bool = False,
    limit: int = 64,
    **facts: Any,
) -> Request:
    """Return a waiting request, or one running in KV stream `stream` if it has computed tokens."""
    stream = facts.pop("stream", 0)
    made = Request(ask(f"{ordinal}", prompt, **facts), ordinal, 0, limit)
    made.num_computed = computed
    made.num_preempted = PREEMPTIONS_MAX if reserved else 0
    if computed:
        made.state = Running(ordinal, stream)
    return made


def cached(*paths: tuple[int, list[int]], n_streams: int = 2) -> PrefixCache:
    """Return a prefix cache of these (KV stream, tokens), all of them evictable."""
    index = PrefixCache(n_streams)
    for stream, tokens in paths:
        index.unpin(index.insert("", tokens, stream)[0])
    return index


# --- cells of running requests ---


def test_allocatable_cells_are_free_or_evictable() -> None:
    index = cached((0, [1, 2, 3]), (1, [4]))
    index.pin("", [1], 1)
    assert KvCachePlanner((5, 7), index, ()).allocatable == [5 + 2, 7 + 1]
    assert KvCachePlanner((5, 7), None, ()).allocatable == [5, 7]


def test_allocate_counts_the_cells_that_must_be_free() -> None:
    planner, one = KvCachePlanner((5, 7), None, ()), request(1, [1], computed=1)
    planner.allocate(one, 0, 3)
    planner.allocate(one, 1, 2)
    planner.allocate(one, 1, 1)
    assert (planner.allocatable, planner.allocated) == ([2, 4], [3, 3])


def test_reserved_cells_are_only_for_reserved_requests() -> None:
    """Two reserved requests need at most 7 and 4 more tokens."""
    first = request(1, [1] * 4, computed=4, reserved=True, limit=11)
    second = request(2, [1] * 4, computed=4, reserved=True, limit=8)
    planner, other = KvCachePlanner((20,), None, [first, second]), request(3, [1], computed=1)
    assert planner.available(other, 0) == 20 - 11
    assert planner.available(first, 0) == 20
    planner.allocate(first, 0, 2)
    assert (planner.allocatable, planner.available(other, 0)) == ([18], 18 - 9)
    planner.allocate(other, 0, 1)
    assert planner.available(other, 0) == 17 - 9
    planner.free(second)
    assert planner.available(other, 0) == 17 + 4 - 5


def test_allocate_one_each_is_all_or_nothing() -> None:
    running = [request(i, [1, 2], computed=1) for i in range(3)]
    planner = KvCachePlanner((3,), None, running)
    assert planner.allocate_one_each(running)
    assert (planner.allocatable, planner.allocated) == ([0], [3])
    assert not planner.allocate_one_each(running[:1])
    assert (planner.allocatable, planner.allocated) == ([0], [3])
    assert planner.allocate_one_each([])
    planner = KvCachePlanner((5,), None, running)
    assert planner.allocate_one_each(running)
    assert planner.allocate_one_each(running[:2])
    assert (planner.allocatable, planner.allocated) == ([0], [5])


def test_allocate_one_each_does_not_use_reserved_cells() -> None:
    reserved = request(1, [1] * 4, computed=4, reserved=True, limit=8)
    others = [request(i, [1, 2], computed=1) for i in (2, 3)]
    assert not KvCachePlanner((6,), None, [reserved, *others]).allocate_one_each([reserved, *others])
    planner = KvCachePlanner((7,), None, [reserved, *others])
    assert planner.allocate_one_each([reserved, *others])
    assert (planner.allocatable, planner.available(others[0], 0)) == ([4], 4 - 3)


def test_allocate_one_each_counts_by_kv_stream() -> None:
    running = [request(1, [1, 2], computed=1), request(2, [1, 2], computed=1, stream=1)]
    planner = KvCachePlanner((2, 3), None, running)
    assert planner.allocate_one_each(running)
    assert (planner.allocatable, planner.allocated) == ([1, 2], [1, 1])


def test_a_stopped_request_frees_its_own_cells_and_its_private_pins() -> None:
    index = cached(n_streams=1)
    stopped, sharer = request(1, [1, 2, 3, 4, 5], computed=5), request(2, [1, 2, 9], computed=3)
    stopped.pin, _ = index.insert("", [1, 2, 3, 4])
    sharer.pin, _ = index.insert("", [1, 2])
    stopped.num_shared, sharer.num_shared = 4, 2
    planner = KvCachePlanner((0,), index, [stopped, sharer])
    planner.free(stopped)
    assert planner.allocatable == [1 + 2], "one cell of its own, and two of the four that it pins"
    planner.free(sharer)
    assert planner.allocatable == [3 + 1], "cells that both pinned count for neither"
    for prefix in (index, None):
        planner = KvCachePlanner((0,), prefix, ())
        n_before = planner.allocatable[0]
        planner.free(request(3, [1, 2], computed=2))
        assert planner.allocatable == [n_before + 2]


def test_admission_pins_the_prefix_and_reserves_the_worst_case() -> None:
    planner = KvCachePlanner((50, 50), None, ())
    planner.admit(
        request(1, [1] * 10, reserved=True, limit=20), Placement(0, n_cached=4, source=0, n_pinned=3)
    )
    assert (planner.allocatable, planner.allocated) == ([47, 50], [0, 0])
    assert planner.available(request(9, [1]), 0) == 47 - 16
    planner.admit(request(2, [1] * 10, reserved=True, limit=12), Placement(0, source=0))
    assert planner.available(request(9, [1]), 0) == 47 - 16 - 12


def test_copied_cells_are_allocated_in_the_target_stream() -> None:
    planner, one = KvCachePlanner((50, 50), None, ()), request(1, [1] * 10)
    planner.allocate(one, 1, 2)
    planner.admit(one, Placement(1, n_cached=4, source=0, n_pinned=3))
    assert (planner.allocatable, planner.allocated) == ([47, 44], [0, 6])


# --- admission and placement ---


def planner_of(
    n_free: tuple[int, ...], index: PrefixCache | None, running: list[Request] | None = None
) -> KvCachePlanner:
    running = running or []
    return KvCachePlanner(n_free, index, running)


def test_a_request_is_placed_in_the_stream_with_most_of_its_prefix() -> None:
    index = cached((0, [1, 2]), (1, [1, 2, 3]))
    made = planner_of((50, 20), index).can_admit(request(1, [1, 2, 3, 4]))
    assert made == Placement(1, n_cached=3, source=1, n_pinned=3, n_same=3)


def test_without_a_cached_prefix_the_emptiest_stream_is_chosen() -> None:
    assert planner_of((20, 50), cached()).can_admit(request(1, [1])) == Placement(1, source=1)
    assert planner_of((50, 50), None).can_admit(request(1, [1])) == Placement(0, source=0)


def test_admission_leaves_lookahead_cells_for_running_requests() -> None:
    """The new request needs 9 cells: one token and eight more. The running one needs its missing one too."""
    running = [request(1, [1, 2, 3], computed=2)]
    assert planner_of((9 + 9,), None, running).can_admit(request(2, [1])) is not None
    assert planner_of((9 + 8,), None, running).can_admit(request(2, [1])) is None


@pytest.mark.parametrize(
    ("free", "stream"), [((2, 12, 30, 25), 2), ((2, 12, 11, 13), 3), ((2, 12, 12, 3), 1)]
)
def test_a_prefix_is_copied_to_the_emptiest_stream_with_free_cells(
    free: tuple[int, ...], stream: int
) -> None:
    """The request needs 12 cells in all, and pins three of them in the source stream."""
    index = cached((0, [1, 2, 3]), n_streams=4)
    assert planner_of(free, index).can_admit(request(1, [1, 2, 3, 4])) == Placement(
        stream, 3, source=0, n_pinned=3, n_same=3
    )


def test_no_placement_if_no_stream_has_free_cells() -> None:
    index = cached((0, [1, 2, 3]), n_streams=2)
    assert planner_of((2, 11), index).can_admit(request(1, [1, 2, 3, 4])) is None


def test_a_prefix_that_cannot_stay_until_the_copy_is_recomputed() -> None:
    """The running request needs two of five allocatable cells soon, so three may be pinned but not four."""
    running = [request(1, [1] * 4, computed=4, limit=6)]
    index = cached((0, [1, 2, 3]), n_streams=2)
    copied = planner_of((2, 20), index, running).can_admit(request(2, [1, 2, 3, 4]))
    assert copied == Placement(1, 3, source=0, n_pinned=3, n_same=3)
    assert planner_of((1, 20), index, running).can_admit(request(2, [1, 2, 3, 4])) == Placement(
        1, source=1, n_same=3
    )


def test_each_admission_reduces_the_allocatable_cells() -> None:
    """Each request needs 12 cells; the first one already pins three of those of the second."""
    index = cached((0, [1, 2, 3]), n_streams=1)
    admission = planner_of((21 + 9,), index)
    for ordinal in (1, 2):
        next_one = request(ordinal, [1, 2, 3, 4])
        place = admission.can_admit(next_one)
        assert place == Placement(0, 3, source=0, n_pinned=3, n_same=3)
        admission.admit(next_one, place)
    assert admission.can_admit(request(3, [9])) == Placement(0, source=0), (
        "33 - 2 * (9 + 3) = 9 cells: just enough"
    )
    admission.admit(request(3, [9]), Placement(0, source=0))
    assert admission.can_admit(request(4, [9], limit=1)) is None


def test_a_copy_counts_in_both_streams() -> None:
    index = cached((0, [1, 2, 3]), n_streams=2)
    admission = planner_of((0, 24), index)
    for ordinal in (1, 2):
        next_one = request(ordinal, [1, 2, 3, 4])
        place = admission.can_admit(next_one)
        assert place is not None
        assert (place.stream, place.n_cached) == ((1, 3) if ordinal == 1 else (1, 0))
        admission.admit(next_one, place)
    assert admission.can_admit(request(3, [9], limit=1)) is None


def test_without_a_cache_a_follower_forks_its_leader() -> None:
    leader = request(1, [1, 2, 3, 4], computed=9, stream=1)
    follower = request(2, [1, 2, 3, 4])
    follower.leader = leader
    made = planner_of((50, 50), None, [leader]).can_admit(follower)
    assert made == Placement(1, n_cached=3, source=1, fork=leader)
    leader.num_computed = 2
    assert planner_of((50, 50), None, [leader]).can_admit(follower) == Placement(
        1, n_cached=2, source=1, fork=leader
    )
    follower.token_ids.extend([7, 8])
    leader.num_computed = 9
    assert planner_of((50, 50), None, [leader]).can_admit(follower) == Placement(
        1, n_cached=3, source=1, fork=leader
    )


def test_only_a_running_request_has_a_kv_stream() -> None:
    with pytest.raises(BrokenInvariant, match="has no KV stream"):
        _ = request(1, [1]).stream


def test_private_pins_of_a_stopped_request_are_allocated_once() -> None:
    """They are free cells or the cached prefix of an admitted request, never both."""
    index = PrefixCache()
    stopping = request(1, [1, 2, 3, 4], computed=4)
    stopping.pin, _ = index.insert("", [1, 2, 3, 4])
    stopping.num_shared = 4
    planner = KvCachePlanner((0,), index, [stopping])
    left = planner.without([stopping])
    assert (planner.allocatable, left.allocatable, planner._freed) == ([0], [4], [])
    place = left.can_admit(request(2, [1, 2, 3], limit=4))
    assert place is not None
    assert (place.n_cached, place.n_pinned) == (2, 2)
    left.admit(request(2, [1, 2, 3], limit=4), place)
    assert left.allocatable == [2]
    index.pin("", [1, 2, 3, 4], 4)
    assert planner.can_admit(request(2, [1, 2, 3])) is None


def test_a_stopped_sibling_is_not_forked() -> None:
    leader = request(1, [1, 2, 3], computed=3)
    follower = request(2, [1, 2, 3])
    follower.leader = leader
    for running, fork in (([leader], leader), ([], None)):
        place = KvCachePlanner((50,), None, running).can_admit(follower)
        assert place is not None
        assert place.fork is fork
