"""Run the compiled context without an engine: whole prompts and greedy continuations."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys._core import Context, DecodeOutput

LOGITS, HIDDEN = 1, 2


def arrays(rows: Sequence[tuple[int, int, Sequence[int], int]]) -> dict[str, NDArray[Any]]:
    """Return rows of (token, position, sequence ids, output flags) as the arrays of `Context.decode`."""
    return {
        "tokens": np.array([r[0] for r in rows], np.int32),
        "positions": np.array([r[1] for r in rows], np.int32),
        "n_seq_id": np.array([len(r[2]) for r in rows], np.int32),
        "seq_ids": np.array([s for r in rows for s in r[2]], np.int64),
        "wants_output": np.array([r[3] for r in rows], np.uint8),
    }


class Runner:
    """A context with small default settings, which is closed at the end of a `with` block."""

    def __init__(self, path: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "n_cells": 1024,
            "n_seq_max": 8,
            "n_batch": 128,
            "max_model_len": 512,
            "n_threads": min(2, len(os.sched_getaffinity(0))),
        }
        self.context = Context(str(path), **{**defaults, **settings})

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.context.close()

    def decode(self, rows: Sequence[tuple[int, int, Sequence[int], int]], **options: Any) -> DecodeOutput:
        """Decode explicit rows."""
        return self.context.decode(**arrays(rows), **options)

    def extend(self, seq: int, tokens: Sequence[int], start: int, flags: int = LOGITS) -> DecodeOutput:
        """Append tokens to a sequence at `start`; each returns logits."""
        return self.decode([(t, start + i, [seq], flags) for i, t in enumerate(tokens)], return_logits=True)

    def forward(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return logits `[T, vocab]` and final hidden states `[T, d_model]` of a prompt in a new sequence."""
        seq = self.context.seq_acquire()
        out = self.extend(seq, tokens, 0, LOGITS | HIDDEN)
        self.context.seq_release(seq)
        assert out.logits is not None
        assert out.hidden is not None
        return out.logits, out.hidden

    def greedy(self, prompt: Sequence[int], n_tokens: int, eos: Collection[int] = ()) -> list[int]:
        """Return the argmax continuation; it ends after an id of `eos`."""
        seq = self.context.seq_acquire()
        rows = [(t, i, [seq], 0) for i, t in enumerate(prompt)]
        rows[-1] = (*rows[-1][:3], LOGITS)
        ids = [int(self.decode(rows).token_ids[0])]
        while len(ids) < n_tokens and ids[-1] not in eos:
            position = len(prompt) + len(ids) - 1
            ids.append(int(self.decode([(ids[-1], position, [seq], LOGITS)]).token_ids[0]))
        self.context.seq_release(seq)
        return ids
