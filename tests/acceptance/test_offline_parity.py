"""The whole offline path gives the ids of transformers, for every family and the real model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import live
from golden import FOLDER, load_golden
from llaisys import LLM, SamplingParams

pytestmark = pytest.mark.stage1
# Encoders and models without a head have no greedy ids.
FOLDERS = sorted(p.parent for p in FOLDER.parent.glob("*/golden.npz") if "greedy_0" in np.load(p).files)
N_OUTPUT = 24
# transformers rotates up to this length by the short factors of LongRoPE; `max_model_len` chooses them here.
ORIGINAL_CONTEXT = {"phi4_mini_bf16": 128}
SMOLLM2 = Path(__file__).parents[1] / "data" / "smollm2-135m" / "golden.json"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_tiny_models(folder: Path) -> None:
    golden = load_golden(folder)
    params = SamplingParams(temperature=0, max_tokens=N_OUTPUT, ignore_eos=True)
    original = ORIGINAL_CONTEXT.get(folder.name, 0)
    is_short = [len(prompt) + N_OUTPUT <= original for prompt in golden.prompts]
    for short in sorted(set(is_short)):
        at = [i for i, each in enumerate(is_short) if each is short]
        with LLM(str(folder), dtype="float32", max_model_len=original if short else None) as llm:
            outputs = llm.generate([{"prompt_token_ids": golden.prompts[i]} for i in at], params)
        assert [o.outputs[0].token_ids for o in outputs] == [golden.greedy[i] for i in at]


@pytest.mark.model
def test_smollm2_chat() -> None:
    """Template, tokenizer, engine, core and detokenizer together, eight conversations in one batch."""
    cases = json.loads(SMOLLM2.read_text("utf-8"))["cases"]
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM("smollm2", dtype="float32", num_kv_cells=2048) as llm:
        outputs = llm.chat([case["messages"] for case in cases], params)
    for output, case in zip(outputs, cases, strict=True):
        assert output.prompt == case["prompt"]
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["greedy_ids"]
        assert output.outputs[0].text == case["greedy_text"]
        assert output.outputs[0].finish_reason == case["finish_reason"]


@pytest.mark.live
def test_any_model_generates_as_transformers_does(model_path: Path) -> None:
    """Tokenizer, engine and core at once: the prompts are texts."""
    wants = live.continuations(model_path)
    params = SamplingParams(temperature=0, max_tokens=live.N_TOKENS, ignore_eos=True)
    with LLM(str(model_path), dtype="float32", num_kv_cells=2048, max_model_len=512) as llm:
        outputs = llm.generate(live.TEXTS, params)
    for output, want in zip(outputs, wants, strict=True):
        assert output.prompt_token_ids == want.prompt_ids
        live.assert_follows(output.outputs[0].token_ids, want)
