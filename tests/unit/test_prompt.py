"""Prompt truncation and tokenized bad words, through LLM and AsyncLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import core, text
from llaisys import LLM, RequestOutputKind, SamplingParams
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.prompt import tokenize_bad_words, truncate_prompt

TOKENIZER = text.tokenizer()
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5}


def ids(shown: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(shown, add_special_tokens=False))


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.one_of(st.none(), st.just(-1), st.integers(1, 40)),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_truncation_keeps_the_end_of_a_prompt(
    prompt: list[int], n_kept: int | None, max_tokens: int | None
) -> None:
    params = SamplingParams(truncate_prompt_tokens=n_kept, max_tokens=max_tokens)
    cut = truncate_prompt(prompt, params, 20)
    n_most = {None: 30, -1: max(1, 20 - (max_tokens or 1))}.get(n_kept, n_kept)
    assert cut == prompt[len(prompt) - min(len(prompt), n_most or 0) :]
    assert truncate_prompt(cut, params, 20) == cut
    right = replace(params, truncation_side="right")
    assert truncate_prompt(prompt, right, 20) == prompt[: len(cut)]


def test_a_bad_word_is_tokenized_with_and_without_a_leading_space() -> None:
    assert tokenize_bad_words(TOKENIZER, ["no", " no", "é"]) == (ids("no"), ids(" no"), ids("é"), ids(" é"))
    assert tokenize_bad_words(TOKENIZER, []) == ()
    with pytest.raises(RejectedError, match="bad_words"):
        tokenize_bad_words(TOKENIZER, ["  "])


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[core.SamplerSpec]:
    """Record the spec of every sampler that the core receives."""
    seen: list[core.SamplerSpec] = []
    attach = core.Context.set_sampler

    def recorded(context: core.Context, seq_id: int, spec: core.SamplerSpec, *arrays: Any) -> None:
        seen.append(spec)
        attach(context, seq_id, spec, *arrays)

    monkeypatch.setattr(core.Context, "set_sampler", recorded)
    return seen


@pytest.mark.usefixtures("fake_model")
def test_llm_truncates_prompts_and_tokenizes_bad_words(specs: list[core.SamplerSpec]) -> None:
    params = SamplingParams(
        **GREEDY,
        n=2,
        truncate_prompt_tokens=3,
        bad_words=["no"],
        allowed_token_ids=[7, 8],
        prompt_logprobs=2,
        logprobs=0,
    )
    with LLM("fake", num_kv_cells=256) as llm:
        (output,) = llm.generate("abcde", params)
    assert output.prompt_token_ids == [*ids("cde")]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [
        [(i, p.logprob, p.decoded_token) for i, p in (entry or {}).items()]
        for entry in output.prompt_logprobs[1:]
    ] == [
        [(i, core.prompt_logprob(ids("cde")[:n], i), shown)]
        for n, i, shown in ((1, *ids("d"), "d"), (2, *ids("e"), "e"))
    ]
    assert {(tuple(map(tuple, s.bad_words)), tuple(s.allowed_ids)) for s in specs} == {
        ((ids("no"), ids(" no")), (7, 8))
    }
    assert sorted(spec.prompt_logprobs for spec in specs) == [-1, 2], "the choices share one prompt"


@pytest.mark.usefixtures("fake_model")
async def test_async_llm_truncates_prompts_and_tokenizes_bad_words(specs: list[core.SamplerSpec]) -> None:
    params = SamplingParams(
        **GREEDY,
        truncate_prompt_tokens=-1,
        bad_words=["no"],
        prompt_logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )
    service = await AsyncLLM.start(Config(num_kv_cells=256, max_model_len=20))
    try:
        deltas = [d async for d in service.generate("x" * 40, params, "a")]
        assert deltas[0].prompt_token_ids == [*ids("x" * 15)] == await service.prompt_ids("x" * 40, params)
        given_once = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
        assert [len(entries) for entries in given_once] == [15]
        assert specs[0].bad_words == [[*ids("no")], [*ids(" no")]]
        plain = SamplingParams(**GREEDY)
        cached = []
        for i, salt in enumerate(("mine", "mine", "yours")):
            async for delta in service.generate("hello", plain, f"{i}", cache_salt=salt):
                cached.append((i, delta.num_cached_tokens))
                break
        assert cached == [(0, 0), (1, 4), (2, 0)]
    finally:
        await service.close()
