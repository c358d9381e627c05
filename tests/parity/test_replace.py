"""After `replace_weight` of every tensor, every family and container gives the bits of the other model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from parity.families import FAMILIES
from parity.gguf_model import gguf_tensors, write_gguf
from parity.random_model import folder_weights, random_weights, shapes, write_model
from runner import Runner

CONTAINERS = [(family, gguf) for family in sorted(FAMILIES) for gguf in (False, True)]


def logits(runner: Runner, tokens: list[int]) -> NDArray[np.float32]:
    return runner.forward(tokens)[0]


@pytest.mark.parametrize(
    ("family", "gguf"), [(family, gguf) for family, gguf in CONTAINERS if not gguf or FAMILIES[family].gguf]
)
@settings(max_examples=3, print_blob=True)
@given(data=st.data(), seed=st.integers(0, 2**32 - 2))
def test_every_tensor_can_be_replaced(family: str, gguf: bool, data: st.DataObject, seed: int) -> None:
    shape = data.draw(shapes(family, gguf=gguf))
    tokens = list(range(10))
    settings = {"n_cells": 64, "n_seq_max": 2, "n_batch": 16, "max_model_len": 64}
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i in (0, 1):
            weights = random_weights(shape, seed + i)
            name = Path(folder) / str(i)
            paths.append(
                write_gguf(name.with_suffix(".gguf"), family, shape, weights)
                if gguf
                else write_model(name, family, shape, weights)
            )
        with Runner(paths[1], **settings) as runner:
            want = logits(runner, tokens)
        stored = gguf_tensors(family, shape, weights) if gguf else folder_weights(family, shape, weights)
        with Runner(paths[0], **settings) as runner:
            assert not np.array_equal(logits(runner, tokens), want)
            for name, value in stored.items():
                if not name.startswith("rope_"):
                    runner.context.replace_weight(name, np.ascontiguousarray(value))
            assert np.array_equal(logits(runner, tokens), want)
