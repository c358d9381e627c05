"""Runner level: batched decode and argmax give transformers' greedy ids. No engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import live
from golden import Golden
from runner import LOGITS, Runner

pytestmark = pytest.mark.stage0


def greedy_together(runner: Runner, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    """Return argmax continuations of prompts that are decoded in the same batches."""
    seqs = [runner.context.seq_acquire() for _ in prompts]
    rows, asked = [], []
    for seq, prompt in zip(seqs, prompts, strict=True):
        rows += [(t, i, [seq], 0) for i, t in enumerate(prompt)]
        rows[-1] = (*rows[-1][:3], LOGITS)
        asked.append(len(rows) - 1)
    out = runner.decode(rows)
    assert out.rows.tolist() == asked
    ids = [[int(t)] for t in out.token_ids]
    for step in range(n_tokens - 1):
        rows = [(ids[i][-1], len(prompts[i]) + step, [seq], LOGITS) for i, seq in enumerate(seqs)]
        for i, token in enumerate(runner.decode(rows).token_ids):
            ids[i].append(int(token))
    return ids


def test_three_prompts_decoded_together(runner: Runner, golden: Golden) -> None:
    assert greedy_together(runner, golden.prompts, 24) == golden.greedy


@pytest.mark.live
def test_any_model_decodes_as_transformers_does(model_path: Path) -> None:
    wants = live.continuations(model_path)
    with Runner(model_path) as runner:
        got = greedy_together(runner, [want.prompt_ids for want in wants], live.N_TOKENS)
    for ids, want in zip(got, wants, strict=True):
        live.assert_follows(ids, want)
