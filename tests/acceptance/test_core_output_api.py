"""Outputs: only output rows, in batch order; logits, hidden states, ids, logprobs, masks."""

from __future__ import annotations

import numpy as np
import pytest

from golden import FOLDER, Golden
from llaisys._core import SamplerSpec
from llaisys.errors import RejectedError
from runner import HIDDEN, LOGITS, Runner

pytestmark = pytest.mark.stage0


def test_only_output_rows_are_returned_in_batch_order(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[1]
    logits, hidden = runner.forward(prompt)
    seq = runner.context.seq_acquire()
    flags = [0, LOGITS, 0, HIDDEN, LOGITS | HIDDEN, 0, LOGITS]
    out = runner.decode([(t, i, [seq], flags[i]) for i, t in enumerate(prompt)], return_logits=True)
    assert out.rows.tolist() == [1, 3, 4, 6]
    assert out.token_ids.tolist() == [logits[1].argmax(), -1, logits[4].argmax(), logits[6].argmax()]
    assert out.logits is not None
    assert out.hidden is not None
    np.testing.assert_array_equal(out.logits[[0, 2, 3]], logits[[1, 4, 6]])
    np.testing.assert_array_equal(out.hidden[[1, 2]], hidden[[3, 4]])
    assert out.faults == []


def test_a_batch_without_output_rows_returns_nothing(runner: Runner) -> None:
    seq = runner.context.seq_acquire()
    out = runner.decode([(1, 0, [seq], 0)])
    assert len(out.rows) == len(out.token_ids) == 0
    assert out.logits is None
    assert out.hidden is None


def test_logprobs_are_of_the_models_own_distribution(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[1]
    logits = runner.forward(prompt)[0][-1].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits)
    seq = runner.context.seq_acquire()
    spec = SamplerSpec(temperature=0.0, logit_bias=[(17, 100.0)], top_logprobs=3)
    runner.context.set_sampler(seq, spec, np.array(prompt, np.int32), np.array([], np.int32))
    out = runner.decode([(t, i, [seq], LOGITS if i == 6 else 0) for i, t in enumerate(prompt)])
    assert out.token_ids.tolist() == [17]
    ((row, logprob, rank, top),) = out.logprobs
    assert row == 0
    assert logprob == pytest.approx(logprobs[17], abs=1e-4)
    assert rank == 1 + int((logprobs > logprobs[17]).sum())
    best = np.argsort(-logprobs, kind="stable")[:3]
    assert [token for token, _ in top] == best.tolist()
    assert [value for _, value in top] == pytest.approx(logprobs[best].tolist(), abs=1e-4)


def test_a_mask_bounds_one_row_and_leaves_the_others(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[1]
    free_choice = int(runner.forward(prompt)[0][-1].argmax())
    s, t = runner.context.seq_acquire(), runner.context.seq_acquire()
    rows = [(token, i, [q], LOGITS if i == 6 else 0) for q in (s, t) for i, token in enumerate(prompt)]
    bits = np.zeros((1, (golden.vocab_size + 31) // 32), np.uint32)
    bits[0, 40 // 32] |= 1 << (40 % 32)
    out = runner.decode(rows, logits_mask=(np.array([6], np.int32), bits))
    assert out.token_ids.tolist() == [40, free_choice]


def test_a_mask_that_allows_nothing_faults_its_row_only(runner: Runner, golden: Golden) -> None:
    prompt = golden.prompts[1]
    want = int(runner.forward(prompt)[0][-1].argmax())
    s, t = runner.context.seq_acquire(), runner.context.seq_acquire()
    rows = [(token, i, [q], LOGITS if i == 6 else 0) for q in (s, t) for i, token in enumerate(prompt)]
    none = np.zeros((1, (golden.vocab_size + 31) // 32), np.uint32)
    out = runner.decode(rows, logits_mask=(np.array([6], np.int32), none))
    assert out.token_ids.tolist() == [-1, want]
    assert out.faults == [(6, "all_masked")]


def test_a_non_finite_row_faults_alone() -> None:
    """Token 5 gets a NaN embedding: the sequence that uses it faults, and the other row is unaffected."""
    with Runner(FOLDER.parent / "qwen2-odd-f32-sharded") as runner:
        want = int(runner.forward([1, 2, 3])[0][-1].argmax())
        table = np.random.default_rng(0).standard_normal((600, 112)).astype(np.float32)
        runner.context.replace_weight("model.embed_tokens.weight", table)
        clean = int(runner.forward([1, 2, 3])[0][-1].argmax())
        table[5] = np.nan
        runner.context.replace_weight("model.embed_tokens.weight", table)
        s, t = runner.context.seq_acquire(), runner.context.seq_acquire()
        rows = [(token, i, [s], LOGITS if i == 2 else 0) for i, token in enumerate([1, 2, 3])]
        out = runner.decode([(5, 0, [t], LOGITS), *rows])
        assert out.token_ids.tolist() == [-1, clean]
        assert out.faults == [(0, "non_finite")]
        assert clean != want  # the swapped table is in use


def test_a_mask_of_the_wrong_shape_is_refused(runner: Runner) -> None:
    seq = runner.context.seq_acquire()
    with pytest.raises(RejectedError):
        runner.decode(
            [(1, 0, [seq], LOGITS)], logits_mask=(np.array([0], np.int32), np.zeros((1, 2), np.uint32))
        )
    with pytest.raises(RejectedError):
        runner.decode(
            [(1, 0, [seq], LOGITS)], logits_mask=(np.array([4], np.int32), np.zeros((1, 19), np.uint32))
        )
    assert runner.context.kv_seq_pos_max(seq) == -1
