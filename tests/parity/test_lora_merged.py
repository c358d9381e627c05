"""An adapter has the outputs of a model whose weights it was merged into, in every family.

This covers row orders, fused projections, gates, norms after projections and scales of branches.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from parity.checkpoints import read_weights
from runner import Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
# Folders, the prefix of their layers, and the modules that adapters may change in some layer.
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES: dict[str, tuple[str, ...]] = {
    "ernie4_5_bf16": SEPARATE,
    "gemma4_bf16": SEPARATE,
    "gemma4_moe_bf16": SEPARATE,
    "glm4_bf16": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "granite4_bf16": SEPARATE,
    "lfm2_bf16": ("q_proj", "k_proj", "v_proj", "self_attn.out_proj", "w1", "w2", "w3"),
    "llama_bias_bf16": SEPARATE,
    "ministral3_bf16": SEPARATE,
    "olmo3_bf16": SEPARATE,
    "phi4_mini_bf16": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "qwen3_5_bf16": SEPARATE,
    "qwen3_moe_bf16": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3-tied-bf16": SEPARATE,
}
RANK, ALPHA = 3, 6


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def is_target(name: str, modules: tuple[str, ...]) -> bool:
    skipped = (".experts.", ".linear_attn.", ".visual.", "vision_tower", "mtp.", ".conv.")
    ends = tuple(f".{module}.weight" for module in modules)
    return name.endswith(ends) and not any(part in name for part in skipped)


@pytest.mark.parametrize("folder", FAMILIES)
def test_an_adapter_equals_merged_weights(folder: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    weights = read_weights(GOLDENS / folder / "model.safetensors")
    merged, matrices = dict(weights), {}
    for name, weight in weights.items():
        if not is_target(name, FAMILIES[folder]):
            continue
        n_out, n_in = weight.shape
        a = (rng.standard_normal((RANK, n_in)) / np.sqrt(n_in)).astype(np.float32)
        b = (0.2 * rng.standard_normal((n_out, RANK)) * np.abs(weight).mean()).astype(np.float32)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        matrices[f"{module}.lora_A.weight"], matrices[f"{module}.lora_B.weight"] = a, b
        merged[name] = weight + np.float32(ALPHA / RANK) * (b @ a)
    assert matrices
    adapter, model = tmp_path / "adapter", tmp_path / "merged"
    for made in (adapter, model):
        made.mkdir()
    write_safetensors(adapter / "adapter_model.safetensors", matrices)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(model / "model.safetensors", merged)
    for name in ("config.json", "generation_config.json"):
        if (GOLDENS / folder / name).exists():
            shutil.copy(GOLDENS / folder / name, model)
    tokens = rng.integers(0, 512, size=70).tolist()
    settings: dict[str, Any] = {"max_model_len": 128}
    with (
        Runner(model, **settings) as whole,
        Runner(GOLDENS / folder, max_loras=1, **settings) as runner,
    ):
        slot, *_ = runner.context.lora_load(str(adapter))
        seq = runner.context.seq_acquire()
        runner.context.seq_set_lora(seq, slot)
        got, want = runner.extend(seq, tokens, 0).logits, whole.forward(tokens)[0]
        base = runner.forward(tokens)[0]
    assert got is not None
    # Float32 in another order; the adapter changes the logits by far more.
    tolerance = 2e-4 * np.abs(want).max()
    assert np.abs(got - want).max() <= tolerance
    assert np.abs(base - want).max() > 20 * tolerance
