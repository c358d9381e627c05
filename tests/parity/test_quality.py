"""The loss of the default (quantized) and bfloat16 modes, and of narrow KV cells, compared with float32.

The logits are teacher-forced on a text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from llaisys.text.tokenizer import load_tokenizer
from runner import Runner

TEXT = Path(__file__).parents[1] / "data" / "text" / "mixed.txt"
WINDOW = 512


def logprobs(
    dtype: str, windows: list[list[int]], model: Path | None = None, kv_dtype: str = "auto"
) -> NDArray[np.float64]:
    """Return log-probabilities `[tokens, vocab]` of all positions of all windows; the default is SmolLM2."""
    rows = []
    with Runner(model or resolve_model("smollm2").path, dtype=dtype, kv_dtype=kv_dtype) as runner:
        for window in windows:
            logits = runner.forward(window)[0].astype(np.float64)
            rows.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    return np.concatenate(rows)


def divergence(reference: NDArray[np.float64], mode: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean KL over tokens, and the share of tokens with the same argmax."""
    kl = (np.exp(reference) * (reference - mode)).sum(-1).mean()
    return float(kl), float((reference.argmax(-1) == mode.argmax(-1)).mean())


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    tokenizer = load_tokenizer(inspect_model(str(resolve_model("smollm2").path)))
    ids = tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    assert len(ids) >= 2000
    return [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]


@pytest.fixture(scope="module")
def reference(windows: list[list[int]]) -> NDArray[np.float64]:
    return logprobs("float32", windows)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "max_kl", "min_top1"), [("auto", 0.005, 0.94), ("bfloat16", 0.0005, 0.98)])
def test_mode_stays_close_to_float32(
    windows: list[list[int]], reference: NDArray[np.float64], dtype: str, max_kl: float, min_top1: float
) -> None:
    mode = logprobs(dtype, windows)
    kl, top1 = divergence(reference, mode)
    print(f"{dtype}: {len(mode)} tokens, mean KL {kl:.6f}, top-1 agreement {top1:.4f}")
    assert kl <= max_kl
    assert top1 >= min_top1


# The loss of the cells alone, with the rest in float32: over two windows KL is 4e-7, 3.5e-5 and 6.5e-4.
@pytest.mark.long
@pytest.mark.parametrize(
    ("kv_dtype", "max_kl", "min_top1"),
    [("float16", 1e-6, 0.999), ("bfloat16", 1e-4, 0.99), ("int8", 8e-4, 0.97)],
)
def test_narrow_cells_stay_close_to_float32(
    windows: list[list[int]], reference: NDArray[np.float64], kv_dtype: str, max_kl: float, min_top1: float
) -> None:
    mode = logprobs("float32", windows[:2], kv_dtype=kv_dtype)
    kl, top1 = divergence(reference[: len(mode)], mode)
    print(f"cells in {kv_dtype}: {len(mode)} tokens, mean KL {kl:.6f}, top-1 agreement {top1:.4f}")
    assert kl <= max_kl
    assert top1 >= min_top1
