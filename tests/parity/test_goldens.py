"""Logits, hidden states and greedy ids of transformers, for every family and file layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner import Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FOLDERS = sorted(p.parent.name for p in GOLDENS.glob("*/golden.npz"))
TOLERANCE = 1e-4  # of the largest reference logit, as the requirements state


def test_every_family_and_layout_is_here() -> None:
    assert FOLDERS == [
        "llama-untied-bf16",
        "qwen2-f16",
        "qwen2-odd-f32-sharded",
        "qwen2-tied-bf16",
        "qwen3-tied-bf16",
    ]


@pytest.mark.parametrize("isa", ["auto", "scalar"])
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
