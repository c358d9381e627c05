"""The prefix cache: hits, misses with reasons, pins, edits, and the cost of each call."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from llaisys.engine import prefix_cache
from llaisys.engine.prefix_cache import (
    AddNode,
    Miss,
    Pin,
    PrefixCache,
    SplitNode,
    TrimNode,
)
from llaisys.engine.prefix_tree import Node, n_common
from llaisys.engine.request import BrokenInvariant


def insert(cache: PrefixCache, tokens: list[int], salt: str = "", stream: int = 0) -> tuple[Any, ...]:
    """Cache the tokens of a finished sequence and return the edits."""
    pin, edits = cache.insert(salt, tokens, stream)
    cache.unpin(pin)
    cache.check()
    return edits


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of llaisys a call executes: a cost without a clock.

    Other lines do not count, because garbage collection may run foreign callbacks meanwhile.
    """
    n_lines = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal n_lines
        if "llaisys" not in frame.f_code.co_filename:
            return None
        n_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return n_lines


# --- hits ---


def test_cached_tokens_are_a_hit() -> None:
    cache = PrefixCache()
    (added,) = insert(cache, [1, 2, 3, 4])
    assert added == AddNode(added.node_id, 0, 4)
    match = cache.match("", [1, 2, 3, 4, 5], limit=4)
    assert match.n_tokens == 4
    assert match.parts == ((added.node_id, 0, 4),)


def test_a_hit_may_end_at_any_token_without_an_edit() -> None:
    cache = PrefixCache()
    (added,) = insert(cache, [1, 2, 3, 4])
    for n in range(4):
        match = cache.match("", [*[1, 2, 3, 4][:n], 9], limit=10)
        assert match.n_tokens == n
        assert match.parts == (((added.node_id, 0, n),) if n else ())
    assert len(cache.dump()) == 1


def test_an_edited_prompt_shares_the_tokens_before_the_edit() -> None:
    cache = PrefixCache()
    chat = [*range(100)]
    insert(cache, chat)
    edited = [*chat[:60], 500, *chat[61:]]
    assert cache.match("", edited, limit=99).n_tokens == 60
    edits = insert(cache, edited)
    assert [type(edit) for edit in edits] == [SplitNode, AddNode]
    assert edits[0].at == 60
    assert (edits[1].p0, edits[1].p1) == (60, 100)
    assert cache.n_cached() == 140
    for tokens in (chat, edited):
        assert cache.match("", tokens, limit=100).n_tokens == 100


def test_a_longer_chat_adds_only_its_new_tokens() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    (added,) = insert(cache, [1, 2, 3, 4, 5])
    assert (added.p0, added.p1) == (3, 5)
    assert [p[1:] for p in cache.match("", [1, 2, 3, 4, 5], limit=5).parts] == [(0, 3), (3, 5)]


def test_inserting_cached_tokens_adds_no_cells() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    assert insert(cache, [1, 2, 3]) == ()
    (split,) = insert(cache, [1, 2])
    assert isinstance(split, SplitNode)
    assert split.at == 2
    assert cache.n_cached() == 3


def test_limit_bounds_a_hit() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    match = cache.match("", [1, 2, 3], limit=2)
    assert match.n_tokens == 2
    assert match.miss == Miss("limit", 2, 3)
    assert cache.match("", [1, 2, 3], limit=3).miss is None


def test_an_empty_prompt_has_no_hit_and_no_node() -> None:
    cache = PrefixCache()
    assert cache.match("", [], limit=0).n_tokens == 0
    assert cache.match("", [], limit=0).miss is None
    pin, edits = cache.insert("", [])
    assert edits == ()
    cache.unpin(pin)
    cache.check()
    assert cache.dump() == []


def test_tokens_may_be_an_array() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    assert cache.match("", array("i", [1, 2, 4]), limit=3).n_tokens == 2


# --- misses ---


def test_a_miss_has_its_reason() -> None:
    cache = PrefixCache()
    assert cache.match("a", [1, 2], limit=2).miss == Miss("empty", 0, 1)
    insert(cache, [1, 2, 3], salt="b")
    assert cache.match("a", [1, 2], limit=2).miss == Miss("salt", 0, 1)
    insert(cache, [1, 2, 3], salt="a")
    assert cache.match("a", [1, 7, 3], limit=3).miss == Miss("differs", 1, 7, cached=2)
    assert cache.match("a", [8], limit=1).miss == Miss("differs", 0, 8, cached=1)
    assert cache.match("a", [1, 2, 3, 4], limit=4).miss == Miss("empty", 3, 4)
    insert(cache, [1, 2, 3, 5], salt="a")
    assert cache.match("a", [1, 2, 3, 4], limit=4).miss == Miss("differs", 3, 4, cached=5)


def test_the_same_salt_in_another_stream_is_no_salt_miss() -> None:
    cache = PrefixCache(2)
    insert(cache, [1, 2], salt="a", stream=1)
    assert cache.match("a", [1, 2], limit=2, stream=0).miss == Miss("empty", 0, 1)


def test_a_miss_names_evicted_tokens() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 3, 4, 5])
    cache.evict(1)
    assert cache.match("", [1, 2, 3, 4, 5], limit=5).miss == Miss("evicted", 4, 5)
    assert cache.match("", [1, 2, 3, 4, 6], limit=5).miss == Miss("empty", 4, 6)
    cache.evict(1)
    assert cache.match("", [1, 2, 3, 4, 5], limit=5).miss == Miss("evicted", 3, 4)
    cache.evict(3)
    assert cache.match("", [1, 2, 3], limit=3).miss == Miss("evicted", 0, 1)
    assert cache.match("", [2], limit=1).miss == Miss("empty", 0, 2)


def test_remembered_evictions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "N_EVICTED_REMEMBERED_MAX", 10)
    cache = PrefixCache()
    for i in range(11):
        insert(cache, [i])
    cache.evict(11)
    reasons = [cache.match("", [i], limit=1).miss for i in (0, 1, 10)]
    assert [miss.reason for miss in reasons if miss is not None] == ["empty", "evicted", "evicted"]


# --- salts and KV streams ---


def test_cache_salts_do_not_share_prefixes() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3], salt="a")
    assert cache.match("b", [1, 2, 3], limit=3).n_tokens == 0
    assert len(insert(cache, [1, 2, 3], salt="b")) == 1
    assert cache.n_cached() == 6


def test_match_finds_the_longest_hit_of_all_streams() -> None:
    cache = PrefixCache(3)
    for stream, n in ((0, 1), (1, 3), (2, 3)):
        insert(cache, [1, 2, 3][:n], stream=stream)
    found = cache.match("", [1, 2, 3, 4], limit=4)
    assert (found.stream, found.n_tokens) == (1, 3)
    assert cache.match("", [1, 2, 3, 4], limit=4, stream=0).n_tokens == 1
    assert cache.match("", [9], limit=1).stream == 0
    assert [cache.n_cached(stream) for stream in range(3)] == [1, 3, 3]
    assert cache.evict(9, stream=2)[0] == 3
    assert cache.match("", [1, 2, 3, 4], limit=4, stream=2).n_tokens == 0


# --- pins ---


def test_a_pinned_path_is_not_evicted() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3, 4])
    pin, edits = cache.pin("", [1, 2, 3, 9], 3)
    assert pin.n_tokens == 3
    assert [type(edit) for edit in edits] == [SplitNode]
    assert cache.n_evictable() == 1
    assert cache.evict(4)[0] == 1
    assert cache.match("", [1, 2, 3], limit=3).n_tokens == 3
    cache.unpin(pin)
    cache.check()
    assert cache.n_evictable() == 3
    assert cache.evict(4)[0] == 3
    assert cache.dump() == []


def test_a_pin_ends_where_the_cached_tokens_end() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2])
    assert cache.pin("", [1, 2, 3], 3)[0].n_tokens == 2
    assert cache.pin("other", [1, 2, 3], 3)[0].n_tokens == 0
    cache.check()


def test_the_parts_of_a_match_stay_valid_after_the_pin_splits_them() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3, 4])
    match = cache.match("", [1, 2, 9], limit=2)
    _, (split,) = cache.pin("", [1, 2, 9], match.n_tokens)
    assert isinstance(split, SplitNode)
    assert (split.node_id, split.at) == (match.parts[0][0], match.parts[0][2])


def test_a_pin_keeps_its_last_node_when_its_path_is_split() -> None:
    cache = PrefixCache()
    pin, _ = cache.insert("", [1, 2, 3, 4])
    insert(cache, [1, 2, 7])
    assert cache.n_evictable() == 1
    assert cache.n_private(pin) == 4
    assert cache.evict(9)[0] == 1
    cache.unpin(pin)
    assert cache.n_evictable() == 4


def test_private_cells_are_pinned_by_one_pin_only() -> None:
    cache = PrefixCache()
    first, _ = cache.insert("", [1, 2, 3, 4])
    second, _ = cache.insert("", [1, 2, 5])
    assert (cache.n_private(first), cache.n_private(second)) == (2, 1)
    third, _ = cache.pin("", [1, 2, 3, 4], 4)
    assert (cache.n_private(first), cache.n_private(third)) == (0, 0)
    cache.unpin(second)
    cache.unpin(third)
    assert cache.n_private(first) == 4


def test_insert_replaces_the_previous_pin() -> None:
    cache = PrefixCache()
    first, _ = cache.insert("", [1, 2])
    second, _ = cache.insert("", [1, 2, 3], pin=first)
    assert cache.n_evictable() == 0
    cache.check()
    with pytest.raises(BrokenInvariant, match="released before"):
        cache.unpin(first)
    cache.unpin(second)
    assert cache.n_evictable() == 3


def test_a_pin_is_released_once() -> None:
    cache = PrefixCache()
    pin, _ = cache.insert("", [1])
    cache.unpin(pin)
    for again in (cache.unpin, cache.n_private):
        with pytest.raises(BrokenInvariant, match="released before"):
            again(pin)
    cache.check()


# --- eviction ---


def test_the_least_recently_used_path_is_evicted_from_its_end() -> None:
    cache = PrefixCache()
    (first,) = insert(cache, [1, 2, 3])
    (second,) = insert(cache, [4, 5, 6])
    assert cache.evict(2) == (2, (TrimNode(first.node_id, 1),))
    assert cache.evict(2) == (2, (TrimNode(first.node_id, 0), TrimNode(second.node_id, 2)))
    assert cache.evict(0) == (0, ())


def test_a_use_refreshes_the_whole_path() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3])
    insert(cache, [4, 5, 6])
    pin, _ = cache.pin("", [1, 2], 2)
    cache.unpin(pin)
    cache.check()
    cache.evict(4)  # the unused tail, then the other path
    assert [tokens for *_, tokens, _ in cache.dump()] == [[1, 2]]


def test_a_shared_prefix_is_evicted_after_its_branches() -> None:
    cache = PrefixCache()
    for last in (3, 4, 5):
        insert(cache, [1, 2, last])
    cache.evict(3)
    assert [tokens for *_, tokens, _ in cache.dump()] == [[1, 2]]


# --- invalidation ---


def test_invalidate_removes_tokens_and_their_continuations() -> None:
    cache = PrefixCache()
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 3, 4, 5, 6])
    insert(cache, [1, 2, 3, 4, 5, 7])
    insert(cache, [1, 2, 8])
    edits = cache.invalidate("", [1, 2, 3, 4, 5, 9], start=3)
    cache.check()
    assert all(isinstance(edit, TrimNode) for edit in edits)
    assert sorted(tokens for *_, tokens, _ in cache.dump()) == [[1, 2], [3], [8]]
    assert cache.n_cached() == cache.n_evictable() == 4


def test_invalidate_keeps_pinned_tokens() -> None:
    cache = PrefixCache()
    pin, _ = cache.insert("", [1, 2])
    insert(cache, [1, 2, 3])
    cache.invalidate("", [1, 2, 3])
    cache.check()
    assert [tokens for *_, tokens, _ in cache.dump()] == [[1, 2]]
    cache.unpin(pin)
    cache.invalidate("", [1, 2, 3])
    assert cache.dump() == []


def test_invalidate_of_tokens_that_are_not_cached_does_nothing() -> None:
    cache = PrefixCache()
    assert cache.invalidate("", [1, 2]) == ()
    insert(cache, [1, 2])
    assert cache.invalidate("", [1, 2], start=2) == ()
    assert cache.invalidate("", [3]) == ()
    assert cache.n_cached() == 2


# --- check() detects corruption ---


def _corrupt_pin_count(cache: PrefixCache) -> None:
    cache._n_pins = 0


def _corrupt_start(cache: PrefixCache) -> None:
    _leaf(cache).start += 1


def _corrupt_key(cache: PrefixCache) -> None:
    _leaf(cache).tokens[0] = 9


def _corrupt_parent(cache: PrefixCache) -> None:
    _leaf(cache).parent = _leaf(cache)


def _corrupt_node_pins(cache: PrefixCache) -> None:
    root = cache._roots["", 0]
    root.n_pins = 0


def _corrupt_eviction_list(cache: PrefixCache) -> None:
    cache._unpinned[0].popitem()


def _corrupt_eviction_order(cache: PrefixCache) -> None:
    cache._unpinned[0].move_to_end(next(iter(cache._unpinned[0])))


def _corrupt_cell_count(cache: PrefixCache) -> None:
    cache._n_cached[0] += 1


def _corrupt_root(cache: PrefixCache) -> None:
    cache._roots["b", 0] = Node(("b", 0), 99, 0, array("i"))


def _leaf(cache: PrefixCache) -> Node:
    return cache._roots["", 0].children[5].children[6]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_corrupt_pin_count, "count 1 pins, the cache counts 0"),
        (_corrupt_start, "node 4 has the wrong parent"),
        (_corrupt_key, "node 4 has the wrong parent"),
        (_corrupt_parent, "node 4 has the wrong parent"),
        (_corrupt_node_pins, "has fewer pins than its children"),
        (_corrupt_eviction_list, "node 3 is wrongly listed"),
        (_corrupt_eviction_order, "KV stream 0 would evict a node before its children"),
        (_corrupt_cell_count, r"the cell counts of KV stream 0 are wrong: \(4, 2\)"),
        (_corrupt_root, "an empty tree was not removed"),
    ],
)
def test_check_detects_corruption(corrupt: Callable[[PrefixCache], None], message: str) -> None:
    cache = PrefixCache()
    cache.insert("", [1, 2])
    insert(cache, [5])
    insert(cache, [5, 6])
    cache.check()
    corrupt(cache)
    with pytest.raises(BrokenInvariant, match=message):
        cache.check()


# --- costs, counted in lines of Python ---


def grown(n_paths: int, n_tokens: int) -> tuple[PrefixCache, Pin]:
    """Return a cache with many paths, and a pin on the path that starts with 0."""
    cache = PrefixCache()
    for i in range(1, n_paths):
        insert_quietly(cache, [i] * n_tokens)
    return cache, cache.insert("", [0] * n_tokens)[0]


def insert_quietly(cache: PrefixCache, tokens: list[int]) -> None:
    cache.unpin(cache.insert("", tokens)[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, _: cache.match("", [0] * 64 + [7], limit=99),
        lambda cache, _: cache.unpin(cache.pin("", [0] * 64 + [7], 64)[0]),
        lambda cache, _: cache.unpin(cache.insert("", [0] * 32 + [7])[0]),
        lambda cache, _: cache.evict(40),
        lambda cache, pin: cache.n_private(pin),
        lambda cache, _: cache.n_evictable(),
    ],
    ids=["match", "pin", "insert", "evict", "n_private", "n_evictable"],
)
def test_the_cost_of_a_call_does_not_depend_on_the_tree_size(
    call: Callable[[PrefixCache, Pin], object],
) -> None:
    costs = []
    for n_paths in (10, 1000):
        cache, pin = grown(n_paths, 64)
        costs.append(lines_run(lambda cache=cache, pin=pin: call(cache, pin)))  # type: ignore[misc]
    assert costs[0] == costs[1]


def test_the_cost_of_a_match_is_logarithmic_in_its_tokens() -> None:
    """A binary search runs 4 lines per halving, and 64 times the tokens need six more halvings."""
    costs = []
    for n_tokens in (128, 128 * 64):
        cache = PrefixCache()
        insert_quietly(cache, [1] * n_tokens)
        costs.append(lines_run(lambda cache=cache, n=n_tokens: cache.match("", [1] * n, limit=n)))  # type: ignore[misc]
    assert costs[1] - costs[0] <= 6 * 4


def test_common_prefix_of_two_lists() -> None:
    for n in range(20):
        for m in range(20):
            a, b = array("i", [1] * 20), array("i", [1] * m + [2] * (20 - m))
            assert n_common(a[:n], b) == min(n, m)


def test_paths_are_pinned_ones_first_then_the_most_recently_used() -> None:
    cache = PrefixCache(n_streams=2)
    for salt, tokens, stream in (("a", [1, 2, 3], 1), ("", [1, 2, 3], 0), ("", [1, 2, 9, 9], 0)):
        cache.unpin(cache.insert(salt, tokens, stream)[0])
    cache.insert("", [7], 0)
    found = [(salt, stream, ids.tolist()) for salt, stream, ids in cache.paths()]
    assert found == [("", 0, [7]), ("", 0, [1, 2, 9, 9]), ("", 0, [1, 2, 3]), ("a", 1, [1, 2, 3])]
