"""Logits, hidden states and greedy ids of transformers, for every family and file layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llaisys._core import available_isas
from parity.checkpoints import read_shape, read_weights
from parity.numpy_forward import forward, rope_frequencies
from runner import Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
NAMES = sorted(p.parent.name for p in GOLDENS.glob("*/golden.npz"))
# Those with underscores keep some rows of each prompt, and how far rounding alone moves a logit.
FOLDERS, SLIM = [n for n in NAMES if "_" not in n], [n for n in NAMES if "_" in n]
TOLERANCE = 1e-4  # of the largest reference logit, as the requirements state


def test_every_family_and_layout_is_here() -> None:
    assert FOLDERS == [
        "llama-untied-bf16",
        "llama3-rope-bf16",
        "mistral-bf16",
        "qwen2-f16",
        "qwen2-odd-f32-sharded",
        "qwen2-tied-bf16",
        "qwen3-tied-bf16",
    ]
    assert SLIM == ["qwen3_moe_bf16"]  # as transformers 5 saves it: `num_local_experts`, no `num_experts`


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("folder", FOLDERS)
def test_goldens(folder: str, isa: str) -> None:
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
def test_slim_goldens(folder: str, isa: str) -> None:
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


def rounded(frequencies: NDArray[np.float64], to_bf16: bool) -> NDArray[np.float64]:
    """What `model.to(bf16).float()` (or f16) leaves of the rotary buffer."""
    single = frequencies.astype(np.float32)
    if not to_bf16:
        return single.astype(np.float16).astype(np.float64)
    bits = single.view(np.uint32)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return nearest_even.astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("folder", [f for f in FOLDERS if (GOLDENS / f / "golden_rounded.npz").exists()])
def test_the_goldens_as_they_came_differ_by_rounded_frequencies_alone(folder: str) -> None:
    """Why `golden.npz` was made anew (decision 0005): the float64 forward gives the old logits with rotary
    frequencies rounded to the checkpoint's type, and the new ones without, both to f32 rounding."""
    weights = read_weights(GOLDENS / folder / "model.safetensors")
    shape = read_shape(GOLDENS / folder)
    old, new = (np.load(GOLDENS / folder / f"{name}.npz") for name in ("golden_rounded", "golden"))
    frequencies = rope_frequencies(shape)
    for i in range(3):
        prompt = new[f"prompt_{i}"].tolist()
        for want, turns in ((new, frequencies), (old, rounded(frequencies, "bf16" in folder))):
            logits, _ = forward(shape, weights, prompt, turns)
            assert np.abs(logits - want[f"logits_{i}"]).max() <= 5e-6 * np.abs(want[f"logits_{i}"]).max()
