"""Runner level: batched decode and argmax give transformers' greedy ids. No engine."""

from __future__ import annotations

import pytest

from golden import Golden
from runner import LOGITS, Runner

pytestmark = pytest.mark.stage0


def test_three_prompts_decoded_together(runner: Runner, golden: Golden) -> None:
    seqs = [runner.context.seq_acquire() for _ in golden.prompts]
    rows, asked = [], []
    for seq, prompt in zip(seqs, golden.prompts, strict=True):
        rows += [(t, i, [seq], 0) for i, t in enumerate(prompt)]
        rows[-1] = (*rows[-1][:3], LOGITS)
        asked.append(len(rows) - 1)
    out = runner.decode(rows)
    assert out.rows.tolist() == asked
    ids = [[int(t)] for t in out.token_ids]
    for step in range(23):
        rows = [(ids[i][-1], len(golden.prompts[i]) + step, [seq], LOGITS) for i, seq in enumerate(seqs)]
        for i, token in enumerate(runner.decode(rows).token_ids):
            ids[i].append(int(token))
    assert ids == golden.greedy
