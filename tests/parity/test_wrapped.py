"""A golden inside a multimodal checkpoint gives the outputs of transformers as a text model.

The folder is written as published ones are: `text_config`, names with a prefix, tensors of an image encoder.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from golden import load_golden
from llaisys import LLM, SamplingParams
from llaisys.errors import UnsupportedError
from parity.checkpoints import read_weights

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# Architecture, prefix of the text model, of its head, and tensors that are skipped.
WRAPPERS = {
    "Mistral3ForConditionalGeneration": (
        "language_model.model.",
        "language_model.lm_head.",
        ["vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"],
    ),
    "Qwen3_5ForConditionalGeneration": (
        "model.language_model.",
        "lm_head.",
        ["model.visual.pos_embed.weight", "mtp.fc.weight", "mtp.norm.weight"],
    ),
}
CASES = [
    ("Mistral3ForConditionalGeneration", "mistral-bf16"),
    ("Qwen3_5ForConditionalGeneration", "qwen3-tied-bf16"),
]


def wrap(source: Path, target: Path, architecture: str) -> Path:
    """Write `source` as the text model of a multimodal checkpoint; return the folder."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(source / name, target)
    text: dict[str, Any] = json.loads((source / "config.json").read_text("utf-8"))
    del text["architectures"]
    # Published files state these outside.
    outer = {key: text.pop(key) for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in text}
    config = {"architectures": [architecture], "text_config": text, "vision_config": {"depth": 2}, **outer}
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    model, head, skipped = WRAPPERS[architecture]
    weights = {
        name.replace("lm_head.", head)
        if name.startswith("lm_head.")
        else model + name.removeprefix("model."): w
        for name, w in read_weights(source / "model.safetensors").items()
    }
    weights |= {name: np.ones((3, 5), np.float32) for name in skipped}
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_the_text_model_of_a_multimodal_checkpoint_runs(
    architecture: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    golden = load_golden(GOLDENS / name)
    path = wrap(GOLDENS / name, tmp_path / "wrapped", architecture)
    with caplog.at_level(logging.INFO), LLM(str(path), dtype="float32", num_kv_cells=1024) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in golden.prompts], GREEDY)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
        with pytest.raises(UnsupportedError, match=r"messages\[0\]\.content\[1\] is of type 'image_url'"):
            llm.chat([[{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]])
    assert [output.outputs[0].token_ids for output in outputs] == golden.greedy
    skipped = WRAPPERS[architecture][2]
    (line,) = [record.getMessage() for record in caplog.records if "multimodal" in record.getMessage()]
    assert f"{len(skipped)} tensors of other parts are skipped" in line
    for prefix in {tensor.rsplit(".", 2)[0] for tensor in skipped}:
        assert f"{prefix}.* {sum(tensor.startswith(prefix) for tensor in skipped)}" in line


def test_a_plain_checkpoint_logs_no_skipped_tensors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LLM(str(GOLDENS / "mistral-bf16"), num_kv_cells=64):
        pass
    assert "multimodal" not in caplog.text
