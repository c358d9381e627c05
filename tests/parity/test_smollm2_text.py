"""The tokenizer and the chat template in the GGUF of SmolLM2, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llaisys.config import load_config
from llaisys.model_assets import ModelAssets, load_model_assets
from llaisys.sampling_params import SamplingParams
from llaisys.text.detokenizer import IncrementalDetokenizer

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2-135m" / "golden.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> ModelAssets:
    return load_model_assets(load_config({"model": "smollm2"}))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_prompt_text_and_ids(smollm2: ModelAssets, case: dict[str, Any]) -> None:
    assert smollm2.chat_prompt(case["messages"], {}) == (case["prompt"], case["prompt_ids"])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_text_of_the_completion(smollm2: ModelAssets, case: dict[str, Any]) -> None:
    ids = case["greedy_ids"]
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=True) == case["greedy_text"]
    stream = IncrementalDetokenizer(smollm2.tokenizer, SamplingParams())
    assert "".join(stream.push([id]).text for id in ids) + stream.finish() == case["greedy_text"]


def test_defaults_and_text_round_trip(smollm2: ModelAssets) -> None:
    assert smollm2.name == "smollm2"
    assert smollm2.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    text = (DATA / "text" / "mixed.txt").read_text("utf-8")
    ids = smollm2.tokenizer.encode(text, add_special_tokens=True)
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
