"""Logits, hidden states and greedy ids of transformers, for every family and file layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llaisys._core import available_isas
from parity.checkpoints import read_shape, read_weights
from parity.numpy_forward import forward
from runner import Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
NAMES = sorted(p.parent.name for p in GOLDENS.glob("*/golden.npz"))
# A name with underscores is a slim golden: it has only some rows of each prompt. Its `noise` is the largest
# difference of a logit between float32 and float64.
FOLDERS, SLIM = [n for n in NAMES if "_" not in n], [n for n in NAMES if "_" in n]
TOLERANCE = 1e-4  # of the largest reference logit, as the requirements state


def test_goldens_cover_every_family_and_layout() -> None:
    assert FOLDERS == [
        "llama-untied-bf16",
        "llama3-rope-bf16",
        "mistral-bf16",
        "qwen2-f16",
        "qwen2-odd-f32-sharded",
        "qwen2-tied-bf16",
        "qwen3-tied-bf16",
    ]
    # A draft model for qwen2-tied-bf16; a folder saved by transformers 5: `num_local_experts`.
    assert SLIM == [
        "draft_qwen2_bf16",
        "granite4_bf16",
        "hunyuan_dense_bf16",
        "llama_bias_bf16",
        "qwen3_moe_bf16",
        "seed_oss_bf16",
    ]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("folder", FOLDERS)
def test_core_agrees_with_goldens(folder: str, isa: str) -> None:
    golden = np.load(GOLDENS / folder / "golden.npz")
    n_prompts = sum(name.startswith("prompt_") for name in golden.files)
    assert n_prompts == 3
    with Runner(GOLDENS / folder, isa=isa) as runner:
        for i in range(n_prompts):
            prompt = golden[f"prompt_{i}"].tolist()
            logits, hidden = runner.forward(prompt)
            want = golden[f"logits_{i}"]
            assert np.abs(logits - want).max() <= TOLERANCE * np.abs(want).max()
            want = golden[f"hidden_{i}"]
            assert np.abs(hidden - want).max() <= TOLERANCE * np.abs(want).max()
            want_ids = golden[f"greedy_{i}"].tolist()
            assert runner.greedy(prompt, len(want_ids)) == want_ids


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("folder", SLIM)
def test_core_agrees_with_slim_goldens(folder: str, isa: str) -> None:
    golden = np.load(GOLDENS / folder / "golden.npz")
    n_prompts = sum(name.startswith("prompt_") for name in golden.files)
    assert n_prompts == 4
    tolerance = max(20 * float(golden["noise"]), TOLERANCE)
    with Runner(GOLDENS / folder, isa=isa) as runner:
        for i in range(n_prompts):
            prompt, rows = golden[f"prompt_{i}"].tolist(), golden[f"rows_{i}"]
            logits, hidden = runner.forward(prompt)
            assert np.abs(logits[rows] - golden[f"logits_{i}"]).max() <= tolerance
            want = golden[f"hidden_{i}"]
            assert np.abs(hidden[rows] - want).max() <= TOLERANCE * np.abs(want).max()
            want_ids = golden[f"greedy_{i}"].tolist()
            assert runner.greedy(prompt, len(want_ids)) == want_ids


@pytest.mark.parametrize("folder", [f for f in FOLDERS if "sharded" not in f])
def test_numpy_reference_agrees_with_transformers(folder: str) -> None:
    """The float64 forward pass differs from the golden logits by f32 rounding alone."""
    golden = np.load(GOLDENS / folder / "golden.npz")
    weights, shape = read_weights(GOLDENS / folder / "model.safetensors"), read_shape(GOLDENS / folder)
    for i in range(3):
        logits, _ = forward(shape, weights, golden[f"prompt_{i}"].tolist())
        want = golden[f"logits_{i}"]
        assert np.abs(logits - want).max() <= 5e-6 * np.abs(want).max()
