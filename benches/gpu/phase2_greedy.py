"""Phase 2: greedy tokens of our engine on the GPU compared with transformers' (bf16, sdpa).

It runs 32 prompts of 128 tokens each.

usage: phase2_greedy.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240] [--fresh]

Two correct engines in bf16 round differently, so their tokens may differ at a near tie. The judge is
transformers in float32. If no logit of ours has a larger error than the worst of the bf16 reference (`d`,
over the vocabulary, at that position), then our token is at most 2 d below the best one in float32. A first
difference is accepted if that holds; any other fails. Later tokens are not compared. For every eighth prompt
and its completion, the phase also compares the errors of the log-probabilities of all given tokens: it fails
if ours are more than `ACCEPTED_RATIO` times the bf16 reference's, as root mean square.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
from common import Column, Failure, Phase, Row, Skip, arguments
from engines import Ids, Logits, ours, reference
from numpy.typing import NDArray

from llaisys import LLM, SamplingParams

ACCEPTED_GAP = 2.0
# The ratio of two estimates from 800 values or more, which are correlated along a text. Our CPU backend, the
# reference of dry runs, rounds only the inputs of products, and the device also the results: twice as often.
ACCEPTED_RATIO, ACCEPTED_RATIO_DRY = 1.25, 2.0
N_TOKENS, N_TOKENS_DRY = 128, 6
LENGTHS = [length for length in (7, 33, 64, 130) for _ in range(8)]
LENGTHS_DRY = [5, 5, 19, 19]
FED_EVERY = 8
COLUMNS = [
    Column("reference", "reference"),
    Column("equal", "equal"),
    Column("parted", "different at a near tie"),
    Column("worst_gap", "widest gap there, errors of the reference", "{:.2f}"),
    Column("rms_ours", "given tokens: error of log-probabilities, rms", "{:.5f}"),
    Column("rms_reference", "of the reference", "{:.5f}"),
]


def first_difference(want: Ids, got: Ids) -> int | None:
    """Return the first index at which two completions differ."""
    return next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)


def gap_of(token: int, rounded: Logits, exact: Logits) -> float:
    """Return how far a token is below the best one in float32, in units of the worst error of bf16."""
    gap, error = float(exact.max() - exact[token]), float(np.abs(rounded - exact).max())
    return gap / error if gap else 0.0


def logprobs(logits: Logits, ids: Ids) -> NDArray[np.float64]:
    """Return the log-probabilities of `ids[1:]`, `[len(ids) - 1]`, from logits `[len(ids), vocab]`."""
    wide = logits[:-1].astype(np.float64)
    best = wide.max(-1)
    sums = np.log(np.exp(wide - best[:, None]).sum(-1)) + best
    chosen: NDArray[np.float64] = wide[np.arange(len(ids) - 1), ids[1:]] - sums
    return chosen


def our_logprobs(llm: LLM, texts: Sequence[Ids]) -> list[NDArray[np.float64]]:
    """Return the log-probabilities of each text's tokens after the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": ids} for ids in texts], params, use_tqdm=False)
    found = []
    for ids, result in zip(texts, results, strict=True):
        assert result.prompt_logprobs is not None
        entries = [entry or {} for entry in result.prompt_logprobs[1:]]
        found.append(np.array([entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]))
    return found


def rms(values: Sequence[NDArray[np.float64]]) -> float:
    """Return the root mean square of all values."""
    return float(np.sqrt(np.mean(np.concatenate(values) ** 2)))


def compare(folder: Path, prompts: Sequence[Ids], n_tokens: int, dry_run: bool) -> dict[str, Any]:
    """Measure one row. A reference frees its memory, also after an error, for the next row."""
    groups = [list(group) for _, group in itertools.groupby(prompts, len)]
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    settings = {
        "max_model_len": 512,
        "num_kv_cells": 512 * len(prompts) // 2,
        "max_num_seqs": len(prompts),
    }
    with closing(reference(folder, "bfloat16", dry_run)) as refers:
        want = [ids for group in groups for ids in refers.continued(group, n_tokens)]
        fed = [prompt + ids for prompt, ids in list(zip(prompts, want, strict=True))[::FED_EVERY]]
        with ours(folder, **settings) as llm:
            results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            got = [list(result.outputs[0].token_ids) for result in results]
            of_ours = our_logprobs(llm, fed)
        firsts = [first_difference(*both) for both in zip(want, got, strict=True)]
        parted = {i: first for i, first in enumerate(firsts) if first is not None}
        before = {i: prompts[i] + want[i][:first] for i, first in parted.items()}
        rounded = {i: refers.logits(ids)[-1] for i, ids in before.items()}
        of_rounded = [logprobs(refers.logits(ids), ids) for ids in fed]
    with closing(reference(folder, "float32", dry_run)) as judge:
        gaps = {i: gap_of(got[i][parted[i]], rounded[i], judge.logits(ids)[-1]) for i, ids in before.items()}
        of_exact = [logprobs(judge.logits(ids), ids) for ids in fed]
    values: dict[str, Any] = {
        "reference": refers.name,
        "equal": f"{len(prompts) - len(parted)} of {len(prompts)}",
        "parted": len(parted),
        "worst_gap": max(gaps.values(), default=0.0),
        "rms_ours": rms([a - b for a, b in zip(of_ours, of_exact, strict=True)]),
        "rms_reference": rms([a - b for a, b in zip(of_rounded, of_exact, strict=True)]),
    }
    wrong = {i: round(gap, 2) for i, gap in gaps.items() if gap > ACCEPTED_GAP}
    if wrong:
        raise Failure(f"prompts {wrong} differ by more than {ACCEPTED_GAP} errors of the reference", **values)
    ratio = ACCEPTED_RATIO_DRY if dry_run else ACCEPTED_RATIO
    if values["rms_ours"] > ratio * values["rms_reference"]:
        raise Failure(f"the error is more than {ratio} times the reference's", **values)
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
    phase.note(
        f"A difference is accepted up to {ACCEPTED_GAP} times the reference's worst error, judged in float32."
    )
    rows = [Row("SmolLM2, 8 layers", partial(real_row, flags.out, flags.inputs), 30)]
    expected_s = {"0.5B": 25, "1.5B": 35, "7B": 80}
    rows += [
        Row(f"Qwen2.5 {name}, random", partial(random_of, name), expected_s[name]) for name in models.QWEN
    ]
    return phase.run(rows)


if __name__ == "__main__":
    sys.exit(main())
