"""Golden models in other forms: GGUF files as llama.cpp's converter writes them, and Granite 4.0's folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from parity.checkpoints import read_model
from parity.gguf_files import read_tensors, write_like
from parity.gguf_model import write_gguf
from parity.numpy_forward import Shape, forward
from parity.random_model import random_weights, write_model
from runner import Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FOLDERS = ["granite4_bf16", "hunyuan_dense_bf16", "llama_bias_bf16", "seed_oss_bf16"]
TOLERANCE = 1e-4


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_of_a_golden_gives_the_outputs_of_transformers(folder: str, tmp_path: Path) -> None:
    golden = np.load(GOLDENS / folder / "golden.npz")
    tolerance = max(20 * float(golden["noise"]), TOLERANCE)
    path = write_gguf(tmp_path / "model.gguf", *read_model(GOLDENS / folder))
    with Runner(path) as file, Runner(GOLDENS / folder) as own:
        for i in range(4):
            prompt, rows = golden[f"prompt_{i}"].tolist(), golden[f"rows_{i}"]
            logits, _ = file.forward(prompt)
            assert np.abs(logits[rows] - golden[f"logits_{i}"]).max() <= tolerance
            want_ids = golden[f"greedy_{i}"].tolist()
            assert file.greedy(prompt, len(want_ids)) == want_ids
            # A GGUF file has Hunyuan's stretched base, rounded to float32.
            if folder != "hunyuan_dense_bf16":
                assert np.array_equal(logits, own.forward(prompt)[0])


@pytest.mark.parametrize("folder", FOLDERS)
def test_numpy_reference_agrees_with_transformers(folder: str) -> None:
    golden = np.load(GOLDENS / folder / "golden.npz")
    _, shape, weights = read_model(GOLDENS / folder)
    for i in range(4):
        logits, _ = forward(shape, weights, golden[f"prompt_{i}"].tolist())
        # `noise` is the largest such difference of transformers' own float64 run.
        assert np.abs(logits[golden[f"rows_{i}"]] - golden[f"logits_{i}"]).max() <= 2 * float(golden["noise"])


def test_a_dense_granite_4_0_is_granite_with_other_names(tmp_path: Path) -> None:
    """`GraniteMoeHybridForCausalLM` with attention layers only and no experts."""
    golden = np.load(GOLDENS / "granite4_bf16" / "golden.npz")
    _, shape, weights = read_model(GOLDENS / "granite4_bf16")
    folder = write_model(tmp_path / "folder", "granitemoehybrid", shape, weights, old_spelling=True)
    file = write_gguf(tmp_path / "model.gguf", "granitemoehybrid", shape, weights)
    for path in (folder, file):
        with Runner(path) as runner, Runner(GOLDENS / "granite4_bf16") as granite:
            prompt, want_ids = golden["prompt_2"].tolist(), golden["greedy_2"].tolist()
            assert np.array_equal(runner.forward(prompt)[0], granite.forward(prompt)[0])
            assert runner.greedy(prompt, len(want_ids)) == want_ids


SHAPE = Shape(
    n_layers=2,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    d_head=16,
    d_ff=96,
    vocab_size=64,
    rope_theta=1e4,
    rms_eps=1e-5,
    qkv_bias=True,
    qk_norm="none",
    tied=False,
    max_positions=512,
    o_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantized_matrices_and_their_biases(dtype: str, tmp_path: Path) -> None:
    """In float32 the outputs are those of the same values in F32; in the file's precision, close to them."""
    plain = write_gguf(tmp_path / "plain.gguf", "llama", SHAPE, random_weights(SHAPE, 3))
    packed, again = {}, {}
    kind = gguf.GGMLQuantizationType[dtype]
    for name, values in read_tensors(plain).items():
        packed[name] = again[name] = ("F32", values.shape, values.tobytes())
        if values.ndim == 2:
            blocks = gguf.quants.quantize(values, kind)
            packed[name] = (dtype, values.shape, blocks.tobytes())
            rounded = gguf.quants.dequantize(blocks, kind).astype(np.float32)
            again[name] = ("F32", values.shape, rounded.tobytes())
    assert sum(name.endswith(".bias") for name in packed) == 2 * 7
    mixed = write_like(plain, tmp_path / "mixed.gguf", packed)
    reference = write_like(plain, tmp_path / "reference.gguf", again)
    tokens = list(range(1, 40))
    with Runner(reference) as runner:
        want = runner.forward(tokens)[0]
    with Runner(mixed) as runner:
        assert np.array_equal(runner.forward(tokens)[0], want)
    with Runner(mixed, dtype="auto") as runner:
        # Inputs of products are rounded to 127 steps, keys and values to 8 bits of mantissa.
        assert np.abs(runner.forward(tokens)[0] - want).max() <= 0.05 * np.abs(want).max()
