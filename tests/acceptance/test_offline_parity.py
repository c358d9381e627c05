"""The whole offline path gives the ids of transformers, for every family and the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import live
from golden import FOLDER, load_golden
from llaisys import LLM, SamplingParams

pytestmark = pytest.mark.stage1
FOLDERS = sorted(p.parent for p in FOLDER.parent.glob("*/golden.npz"))
SMOLLM2 = Path(__file__).parents[1] / "data" / "smollm2-135m" / "golden.json"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_tiny_models(folder: Path) -> None:
    golden = load_golden(folder)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), dtype="float32") as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in golden.prompts], params)
    assert [o.outputs[0].token_ids for o in outputs] == golden.greedy


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
