"""Pruned argmax over the output matrix (`screen_lm_head`) changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden import FOLDER, load_golden
from llaisys import LLM, SamplingParams

FOLDERS = ["qwen2-tied-bf16", "llama-untied-bf16", "qwen3-tied-bf16"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
# Alternating: pruned argmax, sampled, with logprobs, and with a rule that changes logits.
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=24, ignore_eos=True),
]


def generate(
    model: str, prompts: list[list[int]], params: list[SamplingParams], *, prune: bool, dtype: str
) -> list[object]:
    """Return the ids and logprobs of each request."""
    with LLM(model, dtype=dtype, num_kv_cells=2048, screen_lm_head=prune) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_are_equal_with_and_without_pruning(name: str, dtype: str) -> None:
    folder: Path = FOLDER.parent / name
    prompts = (load_golden(folder).prompts * 8)[:8]
    params = (MIXED * 2)[: len(prompts)]
    on, off = (generate(str(folder), prompts, params, prune=prune, dtype=dtype) for prune in (True, False))
    assert on == off


@pytest.mark.model
def test_a_real_model_in_16_bits() -> None:
    prompts = [[1, 100 + i, 2000 + 7 * i, 30 + i] for i in range(16)]
    params = [GREEDY] * 16
    on, off = (generate("smollm2", prompts, params, prune=prune, dtype="bfloat16") for prune in (True, False))
    assert on == off
