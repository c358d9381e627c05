"""GPTQ and AWQ folders of a golden model against the float64 forward on the dequantized values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parity.checkpoints import read_shape, read_weights
from parity.int4_folders import Scheme, write_quantized
from parity.numpy_forward import forward
from runner import Runner

# 128 and 320 columns: the last group of 128 has only half the length.
SOURCE = Path(__file__).parents[1] / "data" / "goldens" / "qwen2-f16"
SCHEMES = [
    Scheme(method, group_size, symmetric)
    for method in ("gptq", "awq")
    for group_size in (32, 64, 128, -1)
    for symmetric in (True, False)
]
# f32 against f64, as in test_numpy.py.
FLOAT32_TOLERANCE = 2e-5
# The float64 forward with inputs rounded to 8 bits in groups of 32 has an error of 0.038 on this model. A
# bfloat16 cache and other roundings change that by a tenth. A wrong nibble order gives an error of 1.
AUTO_RMS = 0.045


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_quantized_folder(scheme: Scheme, tmp_path: Path) -> None:
    left = write_quantized(tmp_path / "model", SOURCE, read_weights(SOURCE / "model.safetensors"), scheme)
    shape = read_shape(SOURCE)
    tokens = np.random.default_rng(1).integers(0, shape.vocab_size, 60).tolist()
    want, _ = forward(shape, left, tokens)
    errors = {}
    for dtype in ("float32", "auto"):
        with Runner(tmp_path / "model", dtype=dtype) as runner:
            errors[dtype] = runner.forward(tokens)[0] - want
    rms = np.sqrt((errors["auto"] ** 2).mean() / (want**2).mean())
    print(f"{scheme}: auto has an rms error of {rms:.4f}")
    assert np.abs(errors["float32"]).max() <= FLOAT32_TOLERANCE * np.abs(want).max()
    assert rms <= AUTO_RMS


def test_quantized_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    weights = read_weights(SOURCE / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    changed = {**weights, name: -weights[name]}
    fingerprints = []
    for number, values in enumerate((weights, changed, weights)):
        write_quantized(tmp_path / str(number), SOURCE, values, SCHEMES[0])
        with Runner(tmp_path / str(number)) as runner:
            fingerprints.append(runner.context.fingerprint())
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
