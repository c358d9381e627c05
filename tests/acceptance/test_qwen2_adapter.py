"""Qwen2 checkpoints: f32, f16, bf16; tied and not; sharded; old and new spellings; odd sizes; rejections."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import FOLDER, load_golden
from llaisys._core import inspect
from llaisys.errors import RejectedError, UnsupportedError
from runner import Runner

pytestmark = pytest.mark.stage0
GOLDENS = FOLDER.parent


@pytest.mark.parametrize("name", ["qwen2-f16", "qwen2-odd-f32-sharded", "qwen2-tied-bf16"])
def test_layouts(name: str) -> None:
    golden = load_golden(GOLDENS / name)
    with Runner(GOLDENS / name) as runner:
        for prompt, logits, greedy in zip(golden.prompts, golden.logits, golden.greedy, strict=True):
            got, _ = runner.forward(prompt)
            assert np.abs(got - logits).max() <= 1e-4 * np.abs(logits).max()
            assert runner.greedy(prompt, 24) == greedy


def test_inspect_reads_the_model_info() -> None:
    info = json.loads(inspect(str(GOLDENS / "qwen2-odd-f32-sharded")))
    assert (info["architecture"], info["dtype"], info["file_format"]) == (
        "Qwen2ForCausalLM",
        "f32",
        "safetensors",
    )
    assert (info["n_layers"], info["d_model"], info["n_heads"], info["n_kv_heads"]) == (3, 112, 7, 1)
    assert (info["d_head"], info["d_ff"], info["vocab_size"]) == (16, 200, 600)
    assert info["kv_bytes_per_cell"] == {
        "float32": 3 * 2 * 16 * 4,
        "float16": 3 * 2 * 16 * 2,
        "bfloat16": 3 * 2 * 16 * 2,
        "int8": 3 * 2 * (16 + 4),
    }
    assert info["eos_token_ids"] == [599]


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "bitsandbytes"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 8}, "(?i)moe"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
    ids=["rope type", "quantization", "moe", "activation"],
)
def test_unsupported_features_are_rejected_by_name(tmp_path: Path, edit: dict[str, Any], says: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | edit), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=says):
        Runner(folder)


def test_a_missing_tensor_and_a_truncated_file_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(GOLDENS / "qwen2-odd-f32-sharded", folder)
    shard = folder / "model-00003-of-00006.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(RejectedError, match="model-00003"):
        Runner(folder)
    shard.unlink()
    with pytest.raises(RejectedError):
        Runner(folder)
