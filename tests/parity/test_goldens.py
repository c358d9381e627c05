"""Logits, hidden states and greedy ids of transformers, for every family and file layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llaisys._core import available_isas
from parity.checkpoints import folder_without, read_model, read_shape, read_weights
from parity.gguf_model import write_gguf
from parity.numpy_forward import forward
from runner import Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
NAMES = sorted(p.parent.name for p in GOLDENS.glob("*/golden.npz"))
# A name with underscores is a slim golden: it has only some rows of each prompt. Its `noise` is the largest
# difference of a logit between float32 and float64.
# Those of encoders and rerankers (test_encoders.py) have vectors and scores instead of continuations.
FOLDERS, SLIM = (
    [n for n in NAMES if "_" not in n],
    [n for n in NAMES if "_" in n and "_embed_" not in n and "_rerank_" not in n],
)
NEW_FAMILIES = [
    "ernie4_5_bf16",
    "glm4_bf16",
    "ministral3_bf16",
    "olmo3_bf16",
    "phi4_mini_bf16",
    "smollm3_bf16",
]
# transformers rotates a sequence by the short factors of LongRoPE up to this length, and a longer one by the
# long factors. A context has one set of factors for all of its sequences.
ORIGINAL_CONTEXT = {"phi4_mini_bf16": 128}
N_GREEDY = 24
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
    forms = [
        "granite4_bf16",
        "hunyuan_dense_bf16",
        "llama_bias_bf16",
        "seed_oss_bf16",
    ]  # test_golden_forms.py
    # test_hybrids.py
    hybrids = ["lfm2_bf16", "lfm2_moe_bf16", "qwen3_5_bf16", "qwen3_5_moe_bf16", "qwen3_next_bf16"]
    # Their GGUF files: crates/llaisys-core/tests/load/gpt_oss.rs
    gpt_oss = ["gpt_oss_bf16", "gpt_oss_mxfp4"]
    gemma4 = ["gemma4_bf16", "gemma4_moe_bf16"]
    others = ["draft_qwen2_bf16", "qwen3_moe_bf16", *gemma4, *gpt_oss]
    assert sorted([*others, *forms, *hybrids, *NEW_FAMILIES]) == SLIM


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


def contexts(name: str, golden: Mapping[str, NDArray[Any]]) -> dict[int, list[int]]:
    """Return the prompts of a slim golden by the `max_model_len` that their outputs need."""
    lengths = [len(golden[f"prompt_{i}"]) + N_GREEDY for i in range(4)]
    original = ORIGINAL_CONTEXT.get(name, 0)
    by_context: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_context.setdefault(original if length <= original else 512, []).append(i)
    return by_context


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("folder", SLIM)
def test_core_agrees_with_slim_goldens(folder: str, isa: str) -> None:
    golden = np.load(GOLDENS / folder / "golden.npz")
    assert sum(name.startswith("prompt_") for name in golden.files) == 4
    tolerance = max(20 * float(golden["noise"]), TOLERANCE)
    for context, prompts in contexts(folder, golden).items():
        with Runner(GOLDENS / folder, isa=isa, max_model_len=context) as runner:
            for i in prompts:
                prompt, rows = golden[f"prompt_{i}"].tolist(), golden[f"rows_{i}"]
                logits, hidden = runner.forward(prompt)
                assert np.abs(logits[rows] - golden[f"logits_{i}"]).max() <= tolerance
                want = golden[f"hidden_{i}"]
                assert np.abs(hidden[rows] - want).max() <= TOLERANCE * np.abs(want).max()
                want_ids = golden[f"greedy_{i}"].tolist()
                assert len(want_ids) == N_GREEDY
                assert runner.greedy(prompt, N_GREEDY) == want_ids


@pytest.mark.parametrize("name", NEW_FAMILIES)
def test_gguf_of_a_golden_gives_equal_outputs(name: str, tmp_path: Path) -> None:
    """The converter's names, row order and keys: the same model as the folder, bit for bit.

    A GGUF file of SmolLM3 has no key for the layers that are not rotated: they are every fourth one.
    """
    golden = np.load(GOLDENS / name / "golden.npz")
    folder = GOLDENS / name
    if name == "smollm3_bf16":
        folder = folder_without(folder, tmp_path, ["no_rope_layers", "no_rope_layer_interval"])
    for context, prompts in contexts(name, golden).items():
        family, shape, weights = read_model(folder, context)
        path = write_gguf(tmp_path / "model.gguf", family, shape, weights)
        with (
            Runner(folder, max_model_len=context) as whole,
            Runner(path, max_model_len=context) as file,
        ):
            for i in prompts:
                prompt = golden[f"prompt_{i}"].tolist()
                for got, want in zip(file.forward(prompt), whole.forward(prompt), strict=True):
                    assert np.array_equal(got, want)


@pytest.mark.parametrize("name", NEW_FAMILIES)
def test_numpy_reference_agrees_with_slim_goldens(name: str) -> None:
    golden = np.load(GOLDENS / name / "golden.npz")
    for context, prompts in contexts(name, golden).items():
        _, shape, weights = read_model(GOLDENS / name, context)
        for i in prompts:
            logits, _ = forward(shape, weights, golden[f"prompt_{i}"].tolist())
            difference = np.abs(logits[golden[f"rows_{i}"]] - golden[f"logits_{i}"]).max()
            assert difference <= max(20 * float(golden["noise"]), TOLERANCE)


@pytest.mark.parametrize("folder", [f for f in FOLDERS if "sharded" not in f])
def test_numpy_reference_agrees_with_transformers(folder: str) -> None:
    """The float64 forward pass differs from the golden logits by f32 rounding alone."""
    golden = np.load(GOLDENS / folder / "golden.npz")
    weights, shape = read_weights(GOLDENS / folder / "model.safetensors"), read_shape(GOLDENS / folder)
    for i in range(3):
        logits, _ = forward(shape, weights, golden[f"prompt_{i}"].tolist())
        want = golden[f"logits_{i}"]
        assert np.abs(logits - want).max() <= 5e-6 * np.abs(want).max()
