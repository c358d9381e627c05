"""Phase 2: greedy tokens of our engine on the GPU compared with transformers' (bf16, sdpa).

It runs 32 prompts of 128 tokens each.

usage: phase2_greedy.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240] [--fresh]

Two correct engines round differently, so their tokens may differ where two tokens are nearly tied. A first
difference is accepted if the reference's own logit of our token is less than 2 ulp of bf16 below its best
one. Then the gap of its best two logits is that small, too. Later tokens are not compared. Any other
difference fails. For every eighth prompt and its completion, the phase also compares our log-probabilities of
all given tokens with the reference's.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
from common import Column, Failure, Phase, Row, Skip, arguments
from engines import Ids, Logits, Reference, ours, reference

from llaisys import LLM, SamplingParams

ACCEPTED_ULP = 2.0
N_TOKENS, N_TOKENS_DRY = 128, 6
LENGTHS = [length for length in (7, 33, 64, 130) for _ in range(8)]
LENGTHS_DRY = [5, 5, 19, 19]
FED_EVERY = 8
COLUMNS = [
    Column("reference", "reference"),
    Column("equal", "equal"),
    Column("parted", "different at a near tie of the reference"),
    Column("worst_ulp", "widest gap there, ulp", "{:.2f}"),
    Column("fed_mean", "given tokens: mean difference of log-probabilities", "{:.4f}"),
    Column("fed_max", "largest", "{:.4f}"),
]


def gap_ulp(logits: Logits, token: int) -> float:
    """Return the gap between the best logit and a token's, in ulp of bf16 at the best logit."""
    best = float(logits.max())
    ulp = 2.0 ** (math.floor(math.log2(max(abs(best), 2.0**-126))) - 7)
    return (best - float(logits[token])) / ulp


def first_gap(prompt: Ids, want: Ids, got: Ids, of: Callable[[Ids], Logits]) -> float | None:
    """Return the gap of our token at the first difference, in ulp; None if the completions are equal."""
    first = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
    if first is None:
        return None
    return gap_ulp(of(prompt + want[:first])[-1], got[first])


def logprob_differences(llm: LLM, refers: Reference, texts: Sequence[Ids]) -> dict[str, float]:
    """Return the mean and the largest difference of the log-probabilities of given texts."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    differences = []
    for ids, result in zip(texts, results, strict=True):
        logits = refers.logits(ids).astype(np.float64)
        sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        assert result.prompt_logprobs is not None
        for position, (token, entry) in enumerate(zip(ids[1:], result.prompt_logprobs[1:], strict=True)):
            assert entry is not None
            differences.append(abs(entry[token].logprob - (logits[position, token] - sums[position])))
    return {"fed_mean": float(np.mean(differences)), "fed_max": float(np.max(differences))}


def compare(folder: Path, prompts: Sequence[Ids], n_tokens: int, dry_run: bool) -> dict[str, Any]:
    """Measure one row."""
    refers = reference(folder, dry_run)
    try:
        groups = [list(group) for _, group in itertools.groupby(prompts, len)]
        want = [ids for group in groups for ids in refers.continued(group, n_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
        settings = {
            "max_model_len": 512,
            "num_kv_cells": 512 * len(prompts) // 2,
            "max_num_seqs": len(prompts),
        }
        with ours(folder, **settings) as llm:
            results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            got = [list(result.outputs[0].token_ids) for result in results]
            texts = [prompt + ids for prompt, ids in list(zip(prompts, want, strict=True))[::FED_EVERY]]
            differences = logprob_differences(llm, refers, texts)
        gaps = [first_gap(*three, refers.logits) for three in zip(prompts, want, got, strict=True)]
    finally:
        refers.close()
    different = [gap for gap in gaps if gap is not None]
    values: dict[str, Any] = {"reference": refers.name, **differences}
    values["equal"] = f"{len(gaps) - len(different)} of {len(gaps)}"
    values |= {"parted": len(different), "worst_ulp": max(different, default=0.0)}
    wrong = {i: gap for i, gap in enumerate(gaps) if gap is not None and gap >= ACCEPTED_ULP}
    if wrong:
        raise Failure(
            f"prompts {wrong} differ {ACCEPTED_ULP} ulp or more below the reference's best", **values
        )
    return values


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[Ids]:
    """Return seeded random prompts."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size - 1) for _ in range(length)] for length in lengths]


def real_row(out: Path, inputs: Path) -> dict[str, Any]:
    """Measure the first layers of SmolLM2, on text."""
    folder = models.smollm2(out, inputs)
    prompts = json.loads((inputs / "prompts.json").read_text("utf-8"))
    return compare(folder, prompts, N_TOKENS, False)


def random_row(out: Path, inputs: Path, name: str, dry_run: bool) -> dict[str, Any]:
    """Measure a random model, on random ids."""
    shape = models.TINY if dry_run else models.QWEN[name]
    folder = models.random_model(out, inputs, name, shape)
    prompts = random_prompts(LENGTHS_DRY if dry_run else LENGTHS, shape.vocab_size)
    return compare(folder, prompts, N_TOKENS_DRY if dry_run else N_TOKENS, dry_run)


def main() -> int:
    """Parse the flags and measure."""
    flags = arguments(__doc__).parse_args()
    phase = Phase(2, "Greedy tokens compared with transformers'", COLUMNS, flags)
    random_of = partial(random_row, flags.out, flags.inputs, dry_run=flags.dry_run)
    if flags.dry_run:
        phase.note("The reference of a dry run without transformers is our CPU backend in bf16.")

        def too_large() -> dict[str, Any]:
            raise Skip("113 MB of real weights are too large for the emulator")

        return phase.run(
            [Row("tiny, random", partial(random_of, "tiny")), Row("SmolLM2, 8 layers", too_large)]
        )
    phase.note(f"A difference is accepted below {ACCEPTED_ULP} ulp of bf16 at the reference's best logit.")
    rows = [Row("SmolLM2, 8 layers", partial(real_row, flags.out, flags.inputs), 30)]
    expected_s = {"0.5B": 40, "1.5B": 60, "7B": 150}
    rows += [
        Row(f"Qwen2.5 {name}, random", partial(random_of, name), expected_s[name]) for name in models.QWEN
    ]
    return phase.run(rows)


if __name__ == "__main__":
    sys.exit(main())
