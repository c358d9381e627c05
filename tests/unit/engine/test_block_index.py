"""Which blocks are on disk: keys, use order, bytes, and the decision to load, against slow models."""

from __future__ import annotations

import random
from itertools import product

import pytest

from llaisys.engine.disk_cache.block_index import REFUSALS_MAX, BlockIndex, LoadCost, block_keys

SECRET = bytes(32)


def test_a_key_stands_for_everything_before_the_end_of_its_block() -> None:
    """Different models, salts, lengths of parts, earlier tokens or secrets give different keys."""
    paths = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6], [9, 2, 3, 4, 5, 6], [1, 2, 3]]
    owners = [("m", ""), ("m", "s"), ("ms", ""), ("n", ""), ("m", "\ud800")]
    names: dict[bytes, object] = {}
    for (model, salt), ids, secret in product(owners, paths, (SECRET, b"\1" * 32)):
        keys = block_keys(secret, model, salt, ids, n_tokens=2)
        assert len(keys) == len(ids) // 2
        for i, key in enumerate(keys):
            what = (model, salt, tuple(ids[: 2 * i + 2]), secret)
            assert names.setdefault(key, what) == what
    n_prefixes = len({tuple(ids[:n]) for ids in paths for n in (2, 4, 6) if n <= len(ids)})
    assert len(names) == len(owners) * n_prefixes * 2


@pytest.mark.parametrize("seed", range(20))
def test_the_index_equals_a_slow_model(seed: int) -> None:
    """A list of (key, size) in order of use."""
    rng = random.Random(seed)
    model = [(bytes([i]), rng.randint(1, 9)) for i in range(rng.randint(0, 6))]
    index = BlockIndex(n_bytes_max=40, blocks=model)
    for _ in range(300):
        key, size = bytes([rng.randrange(12)]), rng.randint(1, 9)
        what = rng.choice(["add", "touch", "remove", "space"])
        known = dict(model)
        if what == "add":
            dropped = index.make_space(size)
            while model and sum(n for _, n in model) + size > 40:
                assert dropped.pop(0) == model.pop(0)[0]
            assert not dropped
            index.add(key, size)
            model = [*((k, n) for k, n in model if k != key), (key, size)]
        elif what == "touch":
            path = rng.sample([bytes([i]) for i in range(12)], 4)
            index.touch(path)
            used = [k for k in reversed(path) if k in known]
            model = [*((k, n) for k, n in model if k not in used), *((k, known[k]) for k in used)]
        elif what == "remove":
            index.remove(key)
            model = [(k, n) for k, n in model if k != key]
        assert list(index._sizes.items()) == model
        assert (len(index), index.n_bytes) == (len(model), sum(n for _, n in model))
        assert index.n_bytes <= 40
        path, first = [bytes([i]) for i in rng.sample(range(12), 5)], rng.randrange(6)
        n = 0
        while first + n < 5 and path[first + n] in dict(model):
            n += 1
        assert index.n_consecutive(path, first) == n


def test_the_first_block_of_a_path_is_dropped_last() -> None:
    index = BlockIndex(3, [(b"a", 1), (b"b", 1), (b"c", 1)])
    index.touch([b"a", b"b", b"c"])
    assert index.make_space(2) == [b"c", b"b"]
    assert b"a" in index


def test_a_load_must_be_faster_than_computing() -> None:
    cost = LoadCost()
    assert cost.is_faster(100, 1, 1.0), "the disk was not measured yet"
    cost.observe(10.0, 100)
    assert cost.is_faster(100, 1, None), "no prompt was measured yet"
    assert cost.is_faster(100, 100, 0.1)
    assert not cost.is_faster(100, 100, 0.09)
    assert not cost.is_faster(100, 50, 0.1), "half of the loaded tokens are in memory"
    cost.observe(0.0, 100)
    assert cost.load_token_s == pytest.approx(0.08)
    assert cost.is_faster(100, 100, 0.09)


def test_a_slow_disk_is_measured_again() -> None:
    cost = LoadCost()
    cost.observe(100.0, 1)
    answers = [cost.is_faster(1, 1, 0.1) for _ in range(2 * (REFUSALS_MAX + 1))]
    assert answers == 2 * [*[False] * REFUSALS_MAX, True]
