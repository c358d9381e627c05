"""decode(batch): many sequences in one forward pass, ubatches, shared rows, and rejections without side
effects."""

from __future__ import annotations

import numpy as np
import pytest

from golden import FOLDER, Golden
from llaisys.errors import ExhaustedError, RejectedError
from runner import LOGITS, Runner

pytestmark = pytest.mark.stage0


def test_rows_of_many_sequences_in_one_batch_equal_each_alone(runner: Runner, golden: Golden) -> None:
    alone = [runner.forward(p)[0] for p in golden.prompts]
    seqs = [runner.context.seq_acquire() for _ in golden.prompts]
    rows = [
        (t, i, [seq], LOGITS) for seq, p in zip(seqs, golden.prompts, strict=True) for i, t in enumerate(p)
    ]
    out = runner.decode(rows, return_logits=True)
    assert out.logits is not None
    np.testing.assert_array_equal(out.logits, np.concatenate(alone))
    for seq in seqs:
        runner.context.seq_release(seq)


def test_interleaved_rows_equal_rows_in_order(runner: Runner, golden: Golden) -> None:
    a, b = golden.prompts[1][:7], golden.prompts[2][:7]
    s, t = runner.context.seq_acquire(), runner.context.seq_acquire()
    rows = [row for i in range(7) for row in ((a[i], i, [s], LOGITS), (b[i], i, [t], LOGITS))]
    out = runner.decode(rows, return_logits=True)
    assert out.logits is not None
    np.testing.assert_array_equal(out.logits[0::2], runner.forward(a)[0])
    np.testing.assert_array_equal(out.logits[1::2], runner.forward(b)[0])


@pytest.mark.parametrize("n_batch", [1, 3, 64])
def test_ubatches_and_chunks_give_the_same_bits(golden: Golden, n_batch: int) -> None:
    prompt = golden.prompts[2]
    with Runner(FOLDER, n_batch=128) as whole:
        want, _ = whole.forward(prompt)
    with Runner(FOLDER, n_batch=n_batch) as runner:
        np.testing.assert_array_equal(runner.forward(prompt)[0], want)
        seq = runner.context.seq_acquire()
        chunks = [prompt[:1], prompt[1:20], prompt[20:21], prompt[21:]]
        start, got = 0, []
        for chunk in chunks:
            got.append(runner.extend(seq, chunk, start).logits)
            start += len(chunk)
        np.testing.assert_array_equal(np.concatenate(got), want)


@pytest.mark.two_cpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_threads_nor_scattered_cells_change_a_bit(golden: Golden, dtype: str) -> None:
    prompt = golden.prompts[2]
    results = []
    for n_threads in (1, 2, 3):
        with Runner(FOLDER, n_threads=n_threads, n_cells=200, dtype=dtype) as runner:
            holes = [runner.context.seq_acquire() for _ in range(2)]
            for i in range(60):  # two sequences side by side, then one of them goes
                runner.decode([(i, i, [s], 0) for s in holes])
            if n_threads > 1:
                runner.context.seq_release(holes[0])
            results.append(runner.forward(prompt)[0])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_a_row_of_two_sequences_is_stored_once_and_seen_by_both(runner: Runner, golden: Golden) -> None:
    prompt, rest = golden.prompts[1][:4], golden.prompts[1][4:]
    s, t = runner.context.seq_acquire(), runner.context.seq_acquire()
    free = runner.context.n_cells_free
    runner.decode([(token, i, [s, t], 0) for i, token in enumerate(prompt)])
    assert runner.context.n_cells_free == free - len(prompt)
    want = runner.forward(golden.prompts[1])[0][-1]
    for seq in (s, t):
        got = runner.extend(seq, rest, len(prompt)).logits
        assert got is not None
        np.testing.assert_array_equal(got[-1], want)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ((600, 3, None, LOGITS), "600"),
        ((-1, 3, None, LOGITS), "-1"),
        ((1, 512, None, LOGITS), "512"),
        ((1, 9, None, LOGITS), "9"),
        ((1, 2, None, LOGITS), "2"),
        ((1, 3, None, 8), "0x8"),
        ((1, 3, [7], LOGITS), "not acquired"),
    ],
    ids=["token", "negative token", "past the context", "gap", "taken position", "flags", "unknown sequence"],
)
def test_an_invalid_row_is_named_without_side_effects(
    runner: Runner, golden: Golden, row: tuple[int, int, list[int] | None, int], says: str
) -> None:
    seq = runner.context.seq_acquire()
    prompt = golden.prompts[1]
    runner.extend(seq, prompt[:3], 0)
    free = runner.context.n_cells_free
    good = [(prompt[3], 3, [seq], LOGITS)] if row[1] not in (3, 2) else []
    with pytest.raises(RejectedError, match=says):
        runner.decode([*good, (row[0], row[1], row[2] or [seq], row[3])])
    assert runner.context.n_cells_free == free
    assert runner.context.kv_seq_pos_max(seq) == 2
    got = runner.extend(seq, prompt[3:], 3).logits
    assert got is not None
    np.testing.assert_array_equal(got, runner.forward(prompt)[0][3:])


def test_full_cache_is_an_error_without_side_effects(golden: Golden) -> None:
    prompt = golden.prompts[2]
    with Runner(FOLDER, n_cells=40, n_batch=8) as runner:
        seq = runner.context.seq_acquire()
        with pytest.raises(ExhaustedError, match="65"):
            runner.extend(seq, prompt, 0)
        assert runner.context.n_cells_free == 40
        assert runner.context.kv_seq_pos_max(seq) == -1
        runner.extend(seq, prompt[:40], 0)


def test_an_empty_batch_and_ragged_arrays_are_refused(runner: Runner) -> None:
    with pytest.raises(RejectedError, match="empty"):
        runner.decode([])
    one = {
        "tokens": np.ones(1, np.int32),
        "seq_ids": np.zeros(1, np.int64),
        "wants_output": np.ones(1, np.uint8),
    }
    with pytest.raises(RejectedError, match="positions"):
        runner.context.decode(positions=np.zeros(2, np.int32), n_seq_id=np.ones(1, np.int32), **one)
