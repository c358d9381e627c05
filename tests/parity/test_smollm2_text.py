"""The tokenizer and the chat template inside SmolLM2's GGUF, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llaisys.config import load_config
from llaisys.model import Model, open_model
from llaisys.text.stream import TextStream
from llaisys.types import SamplingParams

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2-135m" / "golden.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return open_model(load_config({"model": "smollm2"}))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_prompt_text_and_ids(smollm2: Model, case: dict[str, Any]) -> None:
    assert smollm2.chat_prompt(case["messages"], {}) == (case["prompt"], case["prompt_ids"])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_text_of_the_answer(smollm2: Model, case: dict[str, Any]) -> None:
    ids = case["greedy_ids"]
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=True) == case["greedy_text"]
    stream = TextStream(smollm2.tokenizer, SamplingParams())
    assert "".join(stream.push([id]).text for id in ids) + stream.finish() == case["greedy_text"]


def test_defaults_and_text_that_comes_back(smollm2: Model) -> None:
    assert smollm2.name == "smollm2"
    assert smollm2.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    text = (DATA / "text" / "mixed.txt").read_text("utf-8")
    ids = smollm2.tokenizer.encode(text, add_special_tokens=True)
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text
