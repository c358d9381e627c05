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
