"""`kv_seq_add` for every family: the output of a sequence does not depend on its start position.

Shifted keys equal those of the new positions in layers with either rotation.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, find, given, settings
from hypothesis import strategies as st

from llaisys.errors import UnsupportedError
from parity.families import FAMILIES
from parity.numpy_forward import forward
from parity.random_model import random_weights, shapes, write_model
from runner import Runner

# Rotations by up to 54 radians and back by 30 in f32. A wrong rotation gives an error of 1e-2 or more.
TOLERANCE = 1e-4
START, N, GAP = 30, 24, 1e-3


# Other families refuse shifts: queries scaled by position depend on the absolute one, and a norm after the
# rotation has weights for the original angle.
NOT_SHIFTED = sorted(
    name for name, facts in FAMILIES.items() if facts.scaled_queries or facts.qk_norm == "rotated_head"
)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NOT_SHIFTED)))
@settings(max_examples=4, print_blob=True)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_shifted_sequence_continues_as_if_it_had_started_there(
    family: str, data: st.DataObject, seed: int
) -> None:
    shape = data.draw(shapes(family))
    weights = random_weights(shape, seed)
    tokens = np.random.default_rng(seed).integers(0, shape.vocab_size, N + 1).tolist()
    gaps: list[float] = []
    want, _ = forward(shape, weights, tokens, gaps=gaps)
    assume(min(gaps) > GAP)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), family, shape, weights)
        with Runner(path, n_cells=64, n_seq_max=2, n_batch=17, max_model_len=64) as runner:
            seq = runner.context.seq_acquire()
            runner.extend(seq, tokens[:N], START)
            runner.context.kv_seq_add(seq, -1, -1, -START)
            logits = runner.extend(seq, tokens[N:], N).logits
    assert logits is not None
    assert np.abs(logits[0] - want[N]).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("family", NOT_SHIFTED)
def test_a_shift_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """The sequence stays as it was."""
    shape = find(shapes(family), lambda _: True)
    path = write_model(tmp_path, family, shape, random_weights(shape, 1))
    with Runner(path, n_cells=64, n_seq_max=2, n_batch=17, max_model_len=64) as runner:
        seq = runner.context.seq_acquire()
        runner.extend(seq, [1, 2, 3], START)
        with pytest.raises(UnsupportedError, match=rf"kv_seq_add .*{FAMILIES[family].architecture}"):
            runner.context.kv_seq_add(seq, -1, -1, -START)
        assert runner.context.kv_seq_pos_min(seq) == START
