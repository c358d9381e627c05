"""The core against the page-long float64 forward on random configurations of every family row."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.numpy_forward import forward
from parity.random_model import FAMILIES, random_weights, shapes, write_model
from runner import Runner

# f32 products of at most 320 terms near 1 in three layers: an error of 1e-5 of the largest logit is 80 ulp
# of f32. A wrong angle, mask or head shows at 1e-2 or more.
TOLERANCE = 2e-5


@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=25, deadline=None, print_blob=True)
@given(
    data=st.data(), seed=st.integers(0, 2**32 - 1), n_tokens=st.integers(1, 60), old_spelling=st.booleans()
)
def test_core_agrees_with_numpy(
    family: str, data: st.DataObject, seed: int, n_tokens: int, old_spelling: bool
) -> None:
    shape = data.draw(shapes(family))
    weights = random_weights(shape, seed)
    tokens = np.random.default_rng(seed).integers(0, shape.vocab_size, n_tokens).tolist()
    want_logits, want_hidden = forward(shape, weights, tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), family, shape, weights, old_spelling=old_spelling)
        with Runner(path, n_cells=64, n_seq_max=2, n_batch=17, max_model_len=64) as runner:
            logits, hidden = runner.forward(tokens)
    assert np.abs(logits - want_logits).max() <= TOLERANCE * np.abs(want_logits).max()
    assert np.abs(hidden - want_hidden).max() <= TOLERANCE * np.abs(want_hidden).max()
