"""Cache nodes and KV streams of the compiled core: on the golden model, and in a KV cache without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import FOLDER
from llaisys import _core
from llaisys.errors import ExhaustedError, LlaisysError, RejectedError
from runner import LOGITS, Runner

TESTS = Path(__file__).parents[1]
PROMPT = [(7 * i + 3) % 500 for i in range(40)]


def greedy_after(runner: Runner, seq: int, tokens: list[int], n_computed: int) -> list[int]:
    """Return eight greedy ids after `tokens`, of which the sequence has computed the first `n_computed`."""
    rows = [(t, n_computed + i, [seq], 0) for i, t in enumerate(tokens[n_computed:])]
    rows[-1] = (*rows[-1][:3], LOGITS)
    ids = [int(runner.decode(rows).token_ids[0])]
    for position in range(len(tokens), len(tokens) + 7):
        ids.append(int(runner.decode([(ids[-1], position, [seq], LOGITS)]).token_ids[0]))
    return ids


@pytest.mark.parametrize("n_streams", [1, 2, 4])
def test_tokens_do_not_depend_on_the_number_of_kv_streams(n_streams: int) -> None:
    with Runner(FOLDER) as runner:
        want = runner.greedy(PROMPT, 8)
    with Runner(FOLDER, n_streams=n_streams, nan_fill=True, lifo=True) as runner:
        context = runner.context
        first = context.seq_acquire(n_streams - 1)
        assert greedy_after(runner, first, PROMPT, 0) == want
        context.kv_node_cache(1, first, 0, 30)
        context.kv_node_split(1, 10, 2)
        context.seq_release(first)
        for stream in range(n_streams):
            seq = context.seq_acquire(stream)
            free = context.n_cells_free_in(stream)
            context.kv_node_attach(1, seq, 0, 10)
            context.kv_node_attach(2, seq, 10, 25)
            copied = 0 if stream == n_streams - 1 else 25
            assert free - context.n_cells_free_in(stream) == copied
            assert greedy_after(runner, seq, PROMPT, 25) == want
            context.check_integrity()
            context.seq_release(seq)
        context.kv_node_trim(2, 10)
        context.kv_node_trim(1, 0)
        assert context.n_cells_free == context.n_cells


def ends(positions: list[int], seq: int) -> tuple[Any, Any, Any]:
    return (
        np.array(positions, np.int32),
        np.ones(len(positions), np.int32),
        np.full(len(positions), seq, np.int64),
    )


def test_exported_cells_are_valid_in_another_context_and_process() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from golden import FOLDER
from runner import Runner
print(Runner(FOLDER).context.fingerprint())
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with Runner(FOLDER) as runner, Runner(FOLDER, n_streams=2) as restored:
        want = runner.greedy(PROMPT, 8)
        assert runner.context.fingerprint() == restored.context.fingerprint() == other.stdout.strip()
        seq = runner.context.seq_acquire()
        runner.extend(seq, PROMPT, 0)
        runner.context.kv_node_cache(1, seq, 0, 39)
        data = runner.context.kv_node_export(1, 0, 39)
        assert data.dtype == np.uint8
        restored.context.kv_node_import(1, 1, 0, data)
        seq = restored.context.seq_acquire(1)
        restored.context.kv_node_attach(1, seq, 0, 39)
        assert greedy_after(restored, seq, PROMPT, 39) == want
        with pytest.raises(RejectedError, match=f"the data has {len(data) - 1} bytes"):
            restored.context.kv_node_import(2, 0, 0, data[1:])
        with pytest.raises(RejectedError, match="data is not in C order"):
            restored.context.kv_node_import(2, 0, 0, data[::2])


def test_a_kv_cache_without_a_model_behaves_like_a_context() -> None:
    """Equal calls to both give equal results, errors and cells."""
    shape = {"n_cells": 96, "n_seq_max": 3, "n_streams": 2}
    kv = _core.KvCache(**shape)
    with Runner(FOLDER, **shape) as runner:
        context = runner.context

        def call(name: str, *arguments: int) -> Any:
            results = []
            for target in (kv, context):
                try:
                    results.append(getattr(target, name)(*arguments))
                except LlaisysError as error:
                    results.append((type(error), str(error)))
            assert results[0] == results[1], name
            assert kv.digest() == context.digest()
            return results[0]

        def extend(seq: int, positions: list[int]) -> None:
            kv.extend(*ends(positions, seq))
            runner.decode([(1, p, [seq], 0) for p in positions])

        a, b = call("seq_acquire"), call("seq_acquire", 1)
        assert call("seq_acquire", 2)[0] is RejectedError
        extend(a, list(range(20)))
        call("kv_node_cache", 5, a, 0, 16)
        assert call("kv_node_cache", 6, a, 15, 17)[0] is RejectedError
        call("kv_node_attach", 5, b, 0, 12)
        call("kv_seq_cp", a, b, 12, 20)
        call("kv_seq_add", a, 16, -1, 2)
        assert call("kv_seq_pos_max", a) == 21
        call("kv_node_split", 5, 4, 6)
        call("kv_node_trim", 5, 2)
        call("kv_seq_rm", b, 3, 5)
        assert call("n_cells_free_in", 1) == 48 - 18
        call("kv_seq_keep", a)
        c = call("seq_acquire", 1)
        for n in (48, 49):
            rows = [(1, p, [c], 0) for p in range(n)]
            if n == 49:
                with pytest.raises(ExhaustedError, match="49 KV cells are needed, 48 of 48"):
                    kv.extend(*ends(list(range(n)), c))
                with pytest.raises(ExhaustedError, match="49 KV cells are needed, 48 of 48"):
                    runner.decode(rows)
        call("seq_release", a)
        assert call("seq_release", a)[0] is RejectedError
        call("check_integrity")
        assert (kv.n_cells_free, kv.n_seq_free) == (context.n_cells_free, context.n_seq_free)


def test_a_snapshot_lists_sequences_and_nodes() -> None:
    kv = _core.KvCache(n_cells=64, n_seq_max=2, n_streams=2)
    seq = kv.seq_acquire(1)
    kv.extend(*ends(list(range(5)), seq))
    kv.kv_node_cache(2**64 - 1, seq, 2, 5)
    snapshot = kv.snapshot()
    assert snapshot.sequences == [(seq, 1, [(0, 32, 5)])]
    assert snapshot.nodes == [(2**64 - 1, 1, 2, [(2, 34, 3)])]
    assert snapshot.n_free == [32, 27]


def test_with_lifo_the_id_released_last_is_acquired_first() -> None:
    kv = _core.KvCache(n_cells=8, n_seq_max=4, lifo=True)
    a, b = kv.seq_acquire(), kv.seq_acquire()
    kv.seq_release(a)
    kv.seq_release(b)
    assert kv.seq_acquire() == 1 << 16 | 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_cells": 10, "n_streams": 3}, "n_cells is 10, expected a multiple of n_streams"),
        ({"n_streams": 0}, "n_streams is 0"),
        ({"n_seq_max": 257}, "n_seq_max is 257"),
    ],
)
def test_a_wrong_size_is_rejected(settings: dict[str, int], message: str) -> None:
    with pytest.raises(RejectedError, match=message):
        _core.KvCache(**{"n_cells": 12, "n_seq_max": 2, **settings})
    with pytest.raises(RejectedError, match=message):
        Runner(FOLDER, **{"n_cells": 12, **settings})


def test_arrays_of_extend_are_checked() -> None:
    kv = _core.KvCache(n_cells=8, n_seq_max=1)
    seq = kv.seq_acquire()
    positions, n_seq_id, seq_ids = ends([0, 1], seq)
    with pytest.raises(RejectedError, match="positions is not in C order"):
        kv.extend(np.arange(4, dtype=np.int32)[::2], n_seq_id, seq_ids)
    with pytest.raises(RejectedError, match="stream is -1"):
        kv.seq_acquire(-1)
    assert kv.n_cells_free == 8
    kv.extend(positions, n_seq_id, seq_ids)
    assert kv.n_cells_free == 6
