"""The golden models of the tests: tiny models with the outputs of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "data" / "goldens" / "qwen2-tied-bf16"


@dataclass(frozen=True)
class Golden:
    """Prompts with reference logits and argmax continuations (24 ids, not stopping at eos)."""

    prompts: list[list[int]]
    logits: list[NDArray[np.float32]]
    greedy: list[list[int]]

    @property
    def vocab_size(self) -> int:
        return int(self.logits[0].shape[1])


def load_golden(folder: Path = FOLDER) -> Golden:
    """Read `golden.npz` of a folder."""
    data = np.load(folder / "golden.npz")
    n = sum(name.startswith("prompt_") for name in data.files)
    return Golden(
        [data[f"prompt_{i}"].tolist() for i in range(n)],
        [data[f"logits_{i}"] for i in range(n)],
        [data[f"greedy_{i}"].tolist() for i in range(n)],
    )
