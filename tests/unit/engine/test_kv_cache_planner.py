"""Which requests may allocate cells: the allocatable ones, worst cases set aside, what a finished request
frees, and the choice of a KV stream."""

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
    secured: bool = False,
    limit: int = 64,
    **facts: Any,
) -> Request:
    """Waits if nothing of it is computed, else runs in the KV stream `stream`."""
    stream = facts.pop("stream", 0)
    made = Request(ask(f"{ordinal}", prompt, **facts), ordinal, 0, limit)
    made.num_computed = computed
    made.num_preempted = PREEMPTIONS_MAX if secured else 0
    if computed:
        made.state = Running(ordinal, stream)
    return made


def cached(*paths: tuple[int, list[int]], n_streams: int = 2) -> PrefixCache:
    """An index that holds these (KV stream, tokens), all of which can be evicted."""
    index = PrefixCache(n_streams)
    for stream, tokens in paths:
        index.unpin(index.insert("", tokens, stream)[0])
    return index


# --- the cells of one plan ---


def test_what_can_be_had_is_free_or_can_be_evicted() -> None:
    index = cached((0, [1, 2, 3]), (1, [4]))
    index.pin("", [1], 1)
    assert KvCachePlanner((5, 7), index, ()).allocatable == [5 + 2, 7 + 1]
    assert KvCachePlanner((5, 7), None, ()).allocatable == [5, 7]


def test_taking_counts_what_must_be_free() -> None:
    planner, one = KvCachePlanner((5, 7), None, ()), request(1, [1], computed=1)
    planner.allocate(one, 0, 3)
    planner.allocate(one, 1, 2)
    planner.allocate(one, 1, 1)
    assert (planner.allocatable, planner.allocated) == ([2, 4], [3, 3])


def test_what_is_set_aside_is_for_the_secured() -> None:
    """Two of them, with 7 and 4 tokens to come at worst."""
    first = request(1, [1] * 4, computed=4, secured=True, limit=11)
    second = request(2, [1] * 4, computed=4, secured=True, limit=8)
    planner, other = KvCachePlanner((20,), None, [first, second]), request(3, [1], computed=1)
    assert planner.available(other, 0) == 20 - 11
    assert planner.available(first, 0) == 20
    planner.allocate(first, 0, 2)
    assert (planner.allocatable, planner.available(other, 0)) == ([18], 18 - 9)
    planner.allocate(other, 0, 1)
    assert planner.available(other, 0) == 17 - 9
    planner.free(second)
    assert planner.available(other, 0) == 17 + 4 - 5


def test_one_cell_for_each_if_there_is_one_for_each() -> None:
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


def test_one_cell_for_each_does_not_touch_what_is_set_aside() -> None:
    secured = request(1, [1] * 4, computed=4, secured=True, limit=8)
    others = [request(i, [1, 2], computed=1) for i in (2, 3)]
    assert not KvCachePlanner((6,), None, [secured, *others]).allocate_one_each([secured, *others])
    planner = KvCachePlanner((7,), None, [secured, *others])
    assert planner.allocate_one_each([secured, *others])
    assert (planner.allocatable, planner.available(others[0], 0)) == ([4], 4 - 3)


def test_one_cell_for_each_by_stream() -> None:
    running = [request(1, [1, 2], computed=1), request(2, [1, 2], computed=1, stream=1)]
    planner = KvCachePlanner((2, 3), None, running)
    assert planner.allocate_one_each(running)
    assert (planner.allocatable, planner.allocated) == ([1, 2], [1, 1])


def test_who_leaves_gives_its_own_cells_and_what_it_alone_pins() -> None:
    index = cached(n_streams=1)
    leaver, sharer = request(1, [1, 2, 3, 4, 5], computed=5), request(2, [1, 2, 9], computed=3)
    leaver.pin, _ = index.insert("", [1, 2, 3, 4])
    sharer.pin, _ = index.insert("", [1, 2])
    leaver.num_shared, sharer.num_shared = 4, 2
    planner = KvCachePlanner((0,), index, [leaver, sharer])
    planner.free(leaver)
    assert planner.allocatable == [1 + 2], "one of its own, and two of the four that it pins"
    planner.free(sharer)
    assert planner.allocatable == [3 + 1], "what both pinned counts for neither"
    for prefix in (index, None):
        planner = KvCachePlanner((0,), prefix, ())
        n_before = planner.allocatable[0]
        planner.free(request(3, [1, 2], computed=2))
        assert planner.allocatable == [n_before + 2]


def test_an_admitted_request_pins_and_sets_aside() -> None:
    planner = KvCachePlanner((50, 50), None, ())
    planner.admit(
        request(1, [1] * 10, secured=True, limit=20), Placement(0, n_cached=4, source=0, n_pinned=3)
    )
    assert (planner.allocatable, planner.allocated) == ([47, 50], [0, 0])
    assert planner.available(request(9, [1]), 0) == 47 - 16
    planner.admit(request(2, [1] * 10, secured=True, limit=12), Placement(0, source=0))
    assert planner.available(request(9, [1]), 0) == 47 - 16 - 12


def test_what_is_copied_is_taken_where_it_goes() -> None:
    planner, one = KvCachePlanner((50, 50), None, ()), request(1, [1] * 10)
    planner.allocate(one, 1, 2)
    planner.admit(one, Placement(1, n_cached=4, source=0, n_pinned=3))
    assert (planner.allocatable, planner.allocated) == ([47, 44], [0, 6])


# --- admission: where the next one can run ---


def places(
    n_free: tuple[int, ...], index: PrefixCache | None, running: list[Request] | None = None
) -> KvCachePlanner:
    running = running or []
    return KvCachePlanner(n_free, index, running)


def test_where_most_of_the_prefix_lies() -> None:
    index = cached((0, [1, 2]), (1, [1, 2, 3]))
    made = places((50, 20), index).can_admit(request(1, [1, 2, 3, 4]))
    assert made == Placement(1, n_cached=3, source=1, n_pinned=3)


def test_the_emptiest_stream_if_nothing_is_cached() -> None:
    assert places((20, 50), cached()).can_admit(request(1, [1])) == Placement(1, source=1)
    assert places((50, 50), None).can_admit(request(1, [1])) == Placement(0, source=0)


def test_what_runs_needs_its_headroom_first() -> None:
    """9 cells are wanted: one token and eight more; who runs wants eight and its missing one."""
    running = [request(1, [1, 2, 3], computed=2)]
    assert places((9 + 9,), None, running).can_admit(request(2, [1])) is not None
    assert places((9 + 8,), None, running).can_admit(request(2, [1])) is None


@pytest.mark.parametrize(
    ("free", "stream"), [((2, 12, 30, 25), 2), ((2, 12, 11, 13), 3), ((2, 12, 12, 3), 1)]
)
def test_a_prefix_is_copied_to_the_emptiest_stream_with_free_cells(
    free: tuple[int, ...], stream: int
) -> None:
    """12 cells are wanted in all, and three of them are pinned where they lie."""
    index = cached((0, [1, 2, 3]), n_streams=4)
    assert places(free, index).can_admit(request(1, [1, 2, 3, 4])) == Placement(
        stream, 3, source=0, n_pinned=3
    )


def test_no_stream_has_free_cells() -> None:
    index = cached((0, [1, 2, 3]), n_streams=2)
    assert places((2, 11), index).can_admit(request(1, [1, 2, 3, 4])) is None


def test_a_prefix_that_cannot_stay_until_the_copy_is_computed_anew() -> None:
    """Who runs beside it needs two cells soon, of five that can be had: three may be pinned, four not."""
    running = [request(1, [1] * 4, computed=4, limit=6)]
    index = cached((0, [1, 2, 3]), n_streams=2)
    copied = places((2, 20), index, running).can_admit(request(2, [1, 2, 3, 4]))
    assert copied == Placement(1, 3, source=0, n_pinned=3)
    assert places((1, 20), index, running).can_admit(request(2, [1, 2, 3, 4])) == Placement(1, source=1)


def test_each_admission_leaves_less() -> None:
    """Each wants 12 cells; of the second's, three are linked and pinned by the first."""
    index = cached((0, [1, 2, 3]), n_streams=1)
    admission = places((21 + 9,), index)
    for ordinal in (1, 2):
        next_one = request(ordinal, [1, 2, 3, 4])
        place = admission.can_admit(next_one)
        assert place == Placement(0, 3, source=0, n_pinned=3)
        admission.admit(next_one, place)
    assert admission.can_admit(request(3, [9])) == Placement(0, source=0), (
        "33 less 2 * (9 + 3) are 9: just enough"
    )
    admission.admit(request(3, [9]), Placement(0, source=0))
    assert admission.can_admit(request(4, [9], limit=1)) is None


def test_a_copy_counts_in_both_streams() -> None:
    index = cached((0, [1, 2, 3]), n_streams=2)
    admission = places((0, 24), index)
    for ordinal in (1, 2):
        next_one = request(ordinal, [1, 2, 3, 4])
        place = admission.can_admit(next_one)
        assert place is not None
        assert (place.stream, place.n_cached) == ((1, 3) if ordinal == 1 else (1, 0))
        admission.admit(next_one, place)
    assert admission.can_admit(request(3, [9], limit=1)) is None


def test_a_follower_forks_its_leader_where_there_is_no_cache() -> None:
    leader = request(1, [1, 2, 3, 4], computed=9, stream=1)
    follower = request(2, [1, 2, 3, 4])
    follower.leader = leader
    made = places((50, 50), None, [leader]).can_admit(follower)
    assert made == Placement(1, n_cached=3, source=1, fork=leader)
    leader.num_computed = 2
    assert places((50, 50), None, [leader]).can_admit(follower) == Placement(
        1, n_cached=2, source=1, fork=leader
    )
    follower.token_ids.extend([7, 8])
    leader.num_computed = 9
    assert places((50, 50), None, [leader]).can_admit(follower) == Placement(
        1, n_cached=3, source=1, fork=leader
    )


def test_only_who_runs_has_an_stream() -> None:
    with pytest.raises(BrokenInvariant, match="has no KV stream"):
        _ = request(1, [1]).stream


def test_cells_that_only_a_leaving_request_pins_are_given_out_once() -> None:
    """As free cells, or as the cached prefix of a request that is admitted: not as both."""
    index = PrefixCache()
    leaving = request(1, [1, 2, 3, 4], computed=4)
    leaving.pin, _ = index.insert("", [1, 2, 3, 4])
    leaving.num_shared = 4
    planner = KvCachePlanner((0,), index, [leaving])
    left = planner.without([leaving])
    assert (planner.allocatable, left.allocatable, planner._freed) == ([0], [4], [])
    place = left.can_admit(request(2, [1, 2, 3], limit=4))
    assert place is not None
    assert (place.n_cached, place.n_pinned) == (2, 2)
    left.admit(request(2, [1, 2, 3], limit=4), place)
    assert left.allocatable == [2]
    index.pin("", [1, 2, 3, 4], 4)
    assert planner.can_admit(request(2, [1, 2, 3])) is None


def test_a_sibling_that_leaves_is_not_forked() -> None:
    leader = request(1, [1, 2, 3], computed=3)
    follower = request(2, [1, 2, 3])
    follower.leader = leader
    for running, fork in (([leader], leader), ([], None)):
        place = KvCachePlanner((50,), None, running).can_admit(follower)
        assert place is not None
        assert place.fork is fork
