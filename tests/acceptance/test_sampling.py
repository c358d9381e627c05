"""Sampling through the offline path: seeds, bounds, penalties, bias, min_tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from golden import FOLDER, Golden
from llaisys import LLM, SamplingParams

pytestmark = pytest.mark.stage1


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(FOLDER), dtype="float32")


def ids(llm: LLM, prompt: list[int], **params: object) -> list[int]:
    sampling = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})  # type: ignore[arg-type]
    return llm.generate({"prompt_token_ids": prompt}, sampling)[0].outputs[0].token_ids


def test_a_seed_fixes_the_completion_and_another_changes_it(llm: LLM, golden: Golden) -> None:
    prompt = golden.prompts[1]
    answers = [ids(llm, prompt, seed=s) for s in (7, 7, 8)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_a_seeded_completion_does_not_depend_on_the_batch(llm: LLM, golden: Golden) -> None:
    prompt = {"prompt_token_ids": golden.prompts[1]}
    alone = ids(llm, golden.prompts[1], seed=7)
    params = [SamplingParams(seed=s, max_tokens=24, ignore_eos=True) for s in range(20)]
    together = llm.generate([prompt] * 20, params)
    assert together[7].outputs[0].token_ids == alone
    assert len({tuple(o.outputs[0].token_ids) for o in together}) == 20


@pytest.mark.parametrize("narrow", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_setting_of_each_bound_is_greedy(
    llm: LLM, golden: Golden, narrow: dict[str, float]
) -> None:
    assert ids(llm, golden.prompts[1], seed=3, **narrow) == golden.greedy[1]


def test_requested_ids_have_the_bits_that_they_have_among_all(golden: Golden) -> None:
    engine = LLM(str(FOLDER), dtype="float32", max_logprobs=-1)
    wanted = [3, 500, 7, 0]
    prompt = {"prompt_token_ids": golden.prompts[1]}
    params: dict[str, Any] = {"seed": 3, "temperature": 0.9, "logit_bias": {7: 5.0}, "ignore_eos": True}
    (whole,), (some,) = (
        engine.generate(prompt, SamplingParams(max_tokens=12, **params, **more))[0].outputs
        for more in ({"logprobs": -1}, {"logprob_token_ids": wanted})
    )
    assert some.token_ids == whole.token_ids
    assert some.cumulative_logprob == whole.cumulative_logprob
    for token_id, every, named in zip(
        whole.token_ids, whole.logprobs or (), some.logprobs or (), strict=True
    ):
        assert list(named) == list(dict.fromkeys([token_id, *wanted]))
        assert {id: each.logprob for id, each in named.items()} == {id: every[id].logprob for id in named}
        assert [each.rank for each in named.values()] == [every[token_id].rank] + [None] * (len(named) - 1)
    engine.close()


def test_top_k_never_leaves_the_best(llm: LLM, golden: Golden) -> None:
    params = [
        SamplingParams(seed=s, max_tokens=1, top_k=5, temperature=2.0, logprobs=5, ignore_eos=True)
        for s in range(200)
    ]
    outputs = llm.generate([{"prompt_token_ids": golden.prompts[1]}] * 200, params)
    assert outputs[0].outputs[0].logprobs is not None
    best = set(outputs[0].outputs[0].logprobs[0])
    drawn = Counter(o.outputs[0].token_ids[0] for o in outputs)
    assert set(drawn) <= best
    assert len(drawn) > 1


def test_bias_forces_and_forbids(llm: LLM, golden: Golden) -> None:
    assert set(ids(llm, golden.prompts[1], temperature=0, logit_bias={42: 100.0})) == {42}
    first = golden.greedy[1][0]
    assert ids(llm, golden.prompts[1], temperature=0, logit_bias={first: -100.0})[0] != first


def test_penalties_act_on_earlier_tokens(llm: LLM, golden: Golden) -> None:
    prompt = golden.prompts[1]
    loop = ids(llm, prompt, temperature=0, logit_bias={42: 50.0}, max_tokens=8)
    assert loop == [42] * 8
    free = ids(llm, prompt, temperature=0, logit_bias={42: 1.0}, max_tokens=64)
    bound = ids(llm, prompt, temperature=0, logit_bias={42: 1.0}, max_tokens=64, frequency_penalty=2.0)
    assert max(Counter(bound).values()) <= max(Counter(free).values())
    assert len(set(bound)) >= len(set(free))


def test_min_tokens_holds_back_the_stop_ids(llm: LLM, golden: Golden) -> None:
    prompt, greedy = golden.prompts[1], golden.greedy[1]
    stop = greedy[2]
    plain = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], ignore_eos=True)
    held = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], min_tokens=9, ignore_eos=True)
    short, long = llm.generate([{"prompt_token_ids": prompt}] * 2, [plain, held])
    assert short.outputs[0].token_ids[-1] == stop
    assert len(short.outputs[0].token_ids) == 1 + greedy.index(stop)
    assert len(long.outputs[0].token_ids) >= 9
    assert stop not in long.outputs[0].token_ids[:9]
