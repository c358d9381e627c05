"""SmolLM2-135M-Instruct from its GGUF, compared with transformers in float32 on the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llaisys.hub import resolve_model
from runner import LOGITS, Runner

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2-135m" / "golden.json").read_text("utf-8"))
LOGPROB_TOLERANCE = 0.01  # as the requirements state


@pytest.fixture(scope="module")
def float32() -> Runner:
    return Runner(resolve_model("smollm2").path, dtype="float32")


@pytest.mark.parametrize(
    "case", [0, 1, *(pytest.param(case, marks=pytest.mark.long) for case in range(2, 8))]
)
def test_greedy_ids_and_logprobs(float32: Runner, case: int) -> None:
    assert len(GOLDEN["cases"]) == 8
    golden = GOLDEN["cases"][case]
    prompt, answer = golden["prompt_ids"], golden["greedy_ids"]
    assert float32.greedy(prompt, 48, eos=[2]) == answer
    seq = float32.context.seq_acquire()
    out = float32.extend(seq, prompt + answer[:-1], 0, LOGITS)
    float32.context.seq_release(seq)
    assert out.logits is not None
    logits = out.logits[len(prompt) - 1 :].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for step, row in zip(golden["steps"], logprobs, strict=True):
        assert np.abs(row[step["top_ids"]] - step["top_logprobs"]).max() <= LOGPROB_TOLERANCE
