"""The unified KV cache: remove, copy, keep, shift, positions; sharing is an index edit."""

from __future__ import annotations

import numpy as np
import pytest

from golden import FOLDER, Golden
from llaisys.errors import RejectedError
from runner import Runner

pytestmark = pytest.mark.stage0


def last_logits(runner: Runner, seq: int, tokens: list[int], start: int) -> np.ndarray:
    out = runner.extend(seq, tokens, start).logits
    assert out is not None
    return out[-1]


def test_trim_and_continue_differently(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[2]
    seq = runner.context.seq_acquire()
    runner.extend(seq, prompt, 0)
    free = runner.context.n_cells_free
    runner.context.kv_seq_rm(seq, 30, -1)
    assert runner.context.n_cells_free == free + len(prompt) - 30
    assert (runner.context.kv_seq_pos_min(seq), runner.context.kv_seq_pos_max(seq)) == (0, 29)
    other = [*prompt[:30], 9, 8, 7]
    np.testing.assert_array_equal(last_logits(runner, seq, [9, 8, 7], 30), runner.forward(other)[0][-1])


def test_fork_shares_cells_and_both_continue(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[2]
    parent, child = runner.context.seq_acquire(), runner.context.seq_acquire()
    runner.extend(parent, prompt, 0)
    free = runner.context.n_cells_free
    runner.context.kv_seq_cp(parent, child, -1, -1)
    assert runner.context.n_cells_free == free
    n = len(prompt)
    np.testing.assert_array_equal(
        last_logits(runner, child, [3, 4], n), runner.forward([*prompt, 3, 4])[0][-1]
    )
    np.testing.assert_array_equal(
        last_logits(runner, parent, [5, 6], n), runner.forward([*prompt, 5, 6])[0][-1]
    )
    runner.context.seq_release(parent)
    np.testing.assert_array_equal(
        last_logits(runner, child, [1], n + 2), runner.forward([*prompt, 3, 4, 1])[0][-1]
    )
    runner.context.seq_release(child)
    assert runner.context.n_cells_free == runner.context.n_cells


def test_fork_at_any_token(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[2]
    parent = runner.context.seq_acquire()
    runner.extend(parent, prompt, 0)
    for at in (1, 13, 64):
        child = runner.context.seq_acquire()
        runner.context.kv_seq_cp(parent, child, 0, at)
        want = runner.forward([*prompt[:at], 2])[0][-1]
        np.testing.assert_array_equal(last_logits(runner, child, [2], at), want)
        runner.context.seq_release(child)


def test_keep_drops_other_sequences_but_their_ids_stay_acquired(runner: Runner) -> None:
    a, b = runner.context.seq_acquire(), runner.context.seq_acquire()
    runner.extend(a, [1, 2, 3], 0)
    runner.extend(b, [4, 5], 0)
    runner.context.kv_seq_keep(a)
    assert runner.context.kv_seq_pos_max(a) == 2
    assert runner.context.kv_seq_pos_max(b) == -1
    runner.extend(b, [4, 5], 0)


def test_shift_rotates_the_stored_keys(golden: Golden) -> None:
    """A prompt decoded at positions 7 to 26 and shifted by -7 continues as if it had been at 0 to 19."""
    prompt = golden.prompts[2][:20]
    with Runner(FOLDER) as runner:
        seq, other = runner.context.seq_acquire(), runner.context.seq_acquire()
        runner.decode(
            [(t, i + 7, [seq], 0) for i, t in enumerate(prompt)]
        )  # an empty sequence starts anywhere
        runner.context.kv_seq_add(seq, 0, -1, -7)
        assert (runner.context.kv_seq_pos_min(seq), runner.context.kv_seq_pos_max(seq)) == (0, 19)
        runner.extend(other, prompt, 0)
        got, want = last_logits(runner, seq, [5], 20), last_logits(runner, other, [5], 20)
    # RoPE depends on distances only: f32 rounding of two rotations instead of one.
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


def test_a_shift_of_shared_cells_is_refused(runner: Runner) -> None:
    a, b = runner.context.seq_acquire(), runner.context.seq_acquire()
    runner.extend(a, [1, 2, 3], 0)
    runner.context.kv_seq_cp(a, b, -1, -1)
    with pytest.raises(RejectedError, match="shared"):
        runner.context.kv_seq_add(a, 0, -1, 4)
    assert runner.context.kv_seq_pos_max(a) == 2


def test_a_copy_onto_occupied_positions_is_rejected(runner: Runner) -> None:
    a, b = runner.context.seq_acquire(), runner.context.seq_acquire()
    runner.extend(a, [1, 2, 3], 0)
    runner.extend(b, [1, 2], 0)
    with pytest.raises(RejectedError):
        runner.context.kv_seq_cp(a, b, -1, -1)
    assert runner.context.kv_seq_pos_max(b) == 1


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 4e-2)])
def test_narrow_cells_share_keep_and_shift(golden: Golden, kv_dtype: str, tolerance: float) -> None:
    """Shared cells and other batch splits give the same bits; a shift rounds the keys once more."""
    prompt = golden.prompts[2][:40]
    with Runner(FOLDER, kv_dtype=kv_dtype) as runner:
        want = last_logits(runner, runner.context.seq_acquire(), prompt, 0)
        parent, child, later = (runner.context.seq_acquire() for _ in range(3))
        for start in range(0, 39, 13):
            runner.extend(parent, prompt[start : start + 13], start)
        runner.context.kv_seq_cp(parent, child, -1, -1)
        np.testing.assert_array_equal(last_logits(runner, child, prompt[39:], 39), want)
        runner.extend(later, prompt[:39], 7)
        runner.context.kv_seq_add(later, 0, -1, -7)
        got = last_logits(runner, later, prompt[39:], 39)
    assert not np.array_equal(got, want)
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
