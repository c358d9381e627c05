"""Requests join and leave a running batch; each gets the tokens it would get alone."""

from __future__ import annotations

import random

import pytest

from golden import FOLDER, Golden
from llaisys import LLM, SamplingParams

pytestmark = pytest.mark.stage1
N_REQUESTS = 40


def requests(golden: Golden, seed: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [
        {"prompt_token_ids": rng.choice(golden.prompts)[: rng.randint(1, 65)]} for _ in range(N_REQUESTS)
    ]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**32),
            max_tokens=rng.randint(1, 40),
            ignore_eos=True,
        )
        for _ in range(N_REQUESTS)
    ]
    return prompts, params


@pytest.mark.parametrize("seed", [11, 12])
def test_tokens_do_not_depend_on_batch_chunks_or_order(golden: Golden, seed: int) -> None:
    prompts, params = requests(golden, seed)
    answers = []
    for settings in (
        {"max_num_seqs": 1},
        {"max_num_seqs": 40},
        {"max_num_seqs": 7, "max_num_batched_tokens": 16},
        {"max_num_seqs": 16, "num_kv_cells": 256, "num_threads": 1},
    ):
        with LLM(str(FOLDER), dtype="float32", **settings) as llm:
            answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
    assert answers[3] == answers[0]
    assert [len(a) for a in answers[0]] == [p.max_tokens for p in params]


def test_continuous_batching_needs_fewer_steps_than_static_batches(golden: Golden) -> None:
    """Counted on the real core: a static batch runs until its longest completion has ended."""
    seed, n_batch = 14, 8
    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": rng.choice(golden.prompts)[:8]} for _ in range(96)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 40), ignore_eos=True) for _ in prompts]
    with LLM(str(FOLDER), dtype="float32", max_num_seqs=n_batch, speculative_config=None) as llm:

        def num_steps() -> int:
            return llm._engine.client.stats().num_steps

        static = []
        for at in range(0, len(prompts), n_batch):
            static += llm.generate(prompts[at : at + n_batch], params[at : at + n_batch])
        n_static = num_steps()
        continuous = llm.generate(prompts, params)
        n_continuous = num_steps() - n_static
    assert [o.outputs[0].token_ids for o in continuous] == [o.outputs[0].token_ids for o in static]
    assert n_static >= 1.5 * n_continuous, f"seed {seed}: {n_static} steps against {n_continuous}"
