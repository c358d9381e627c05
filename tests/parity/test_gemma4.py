"""Gemma 4 beyond its goldens: formats of weights and cells, chunks, and what is rejected by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden import load_golden
from llaisys import LLM, SamplingParams
from llaisys.errors import UnsupportedError
from parity.checkpoints import read_weights
from parity.test_lora_merged import write_safetensors
from runner import LOGITS, Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FOLDERS = ["gemma4_bf16", "gemma4_moe_bf16"]


def chunks(runner: Runner, prompt: list[int]) -> NDArray[np.float32]:
    """Return the logits of a prompt that is computed in parts of seven tokens."""
    sequence, parts = runner.context.seq_acquire(), []
    for start in range(0, len(prompt), 7):
        output = runner.extend(sequence, prompt[start : start + 7], start, LOGITS)
        assert output.logits is not None
        parts.append(output.logits)
    return np.concatenate(parts)


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", FOLDERS)
def test_chunks_have_the_same_bits_in_each_format(name: str, dtype: str) -> None:
    golden = load_golden(GOLDENS / name)
    prompt = golden.prompts[3]
    with Runner(GOLDENS / name, dtype=dtype, n_batch=32) as runner:
        whole, _ = runner.forward(prompt)
        assert np.array_equal(chunks(runner, prompt), whole)
        # Random weights lose more than trained ones: this only shows that each matrix has its own rows.
        want = golden.logits[3]
        error = np.abs(whole[np.load(GOLDENS / name / "golden.npz")["rows_3"]] - want).mean()
        assert error < {"auto": 0.1, "int8": 0.3, "int4": 1.0}[dtype] * np.abs(want).mean()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("name", FOLDERS)
def test_chunks_have_the_same_bits_in_cells_of_each_type(name: str, kv_dtype: str) -> None:
    prompt = load_golden(GOLDENS / name).prompts[3]
    with Runner(GOLDENS / name, kv_dtype=kv_dtype, n_batch=32) as runner:
        whole, _ = runner.forward(prompt)
        assert np.array_equal(chunks(runner, prompt), whole)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_engine_continues_greedily(name: str) -> None:
    golden = load_golden(GOLDENS / name)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in golden.prompts]
    params = SamplingParams(n=2, temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(GOLDENS / name), dtype="float32", num_kv_cells=2048) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            for output, want in zip(outputs, golden.greedy, strict=True):
                assert [choice.token_ids for choice in output.outputs] == [want] * 2


def test_ranks_are_rejected_by_name() -> None:
    with pytest.raises(UnsupportedError, match="tensor parallelism of the architecture"):
        LLM(str(GOLDENS / FOLDERS[0]), tensor_parallel_size=2)


def test_a_text_model_by_itself_has_the_same_outputs(tmp_path: Path) -> None:
    """Without the wrapper: other names of tensors, and the keys of `text_config` at the top."""
    folder = GOLDENS / FOLDERS[0]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"] | {"architectures": ["Gemma4ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text), encoding="utf-8")
    shutil.copy(folder / "generation_config.json", tmp_path)
    prefix = "model.language_model."
    weights = read_weights(folder / "model.safetensors")
    kept = {f"model.{name.removeprefix(prefix)}": w for name, w in weights.items() if name.startswith(prefix)}
    write_safetensors(tmp_path / "model.safetensors", kept)
    prompt = load_golden(folder).prompts[2]
    with Runner(folder) as wrapped, Runner(tmp_path) as plain:
        assert np.array_equal(wrapped.forward(prompt)[0], plain.forward(prompt)[0])
