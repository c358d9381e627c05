"""Greedy continuations by transformers, computed now, for the model of `--model-path`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees because",
    "1, 2, 3, 4, 5, 6, 7,",
)
N_TOKENS = 24
# Two float32 implementations may choose different tokens if the best logits differ by less than this share of
# the largest logit. It is the tolerance of the goldens' logits, once for each implementation.
TIE = 2e-4


@dataclass(frozen=True, slots=True)
class Continuation:
    """`margins[i]`: the distance of `token_ids[i]` from the second best, as a share of the largest logit."""

    prompt_ids: list[int]
    token_ids: list[int]
    margins: list[float]


def continuations(path: Path, texts: tuple[str, ...] = TEXTS) -> list[Continuation]:
    """Return the float32 continuations by transformers, one text at a time, without stopping at eos."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as e:
        raise pytest.UsageError(
            f"--model-path needs transformers: pip install torch transformers ({e})"
        ) from e
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    made = []
    for text in texts:
        prompt_ids = tokenizer(text)["input_ids"]
        ids, margins = list(prompt_ids), []
        for _ in range(N_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best, second = torch.topk(logits, 2).values.tolist()
            margins.append((best - second) / float(logits.abs().max()))
            ids.append(int(logits.argmax()))
        made.append(Continuation(prompt_ids, ids[len(prompt_ids) :], margins))
    return made


def assert_follows(token_ids: list[int], want: Continuation) -> None:
    """Check that the ids are equal, up to a step with a tie."""
    for step, (ours, theirs) in enumerate(zip(token_ids, want.token_ids, strict=True)):
        if ours != theirs:
            margin = want.margins[step]
            assert margin < TIE, f"step {step}: {ours}, transformers has {theirs} by a margin of {margin:.1e}"
            return
