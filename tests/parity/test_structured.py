"""Structured outputs on SmolLM2, and the token tables of grammars."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from llaisys import LLM, SamplingParams
from llaisys.config import load_config
from llaisys.errors import RejectedError
from llaisys.model_assets import load_model_assets
from llaisys.model_info import ModelInfo
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import StructuredOutputsParams as Spec
from llaisys.text.tokenizer import Tokenizer, load_tokenizer
from schemas import schema

QWEN2 = Path(__file__).parents[1] / "data" / "qwen2-tokenizer"
CHAT = [{"role": "user", "content": "Make up a record as JSON."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", num_kv_cells=8192, max_num_seqs=64) as made:
        yield made


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def sampled(spec: Spec | None, seed: int, max_tokens: int = 32) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=seed, structured_outputs=spec)


def test_regex_choice_and_lark(llm: LLM) -> None:
    specs = {
        r"[A-Z][a-z]{2,8} is \d{1,3} years old\.": Spec(regex=r"[A-Z][a-z]{2,8} is \d{1,3} years old\."),
        "red|blue|gr\u00fcn \U0001f600": Spec(choice=["red", "blue", "gr\u00fcn \U0001f600"]),
        r"\(?(\d\+\d)(\+\d){0,3}\)?": Spec(
            grammar='start: sum | "(" sum ")"\nsum: D "+" D ("+" D){0,3}\nD: /[0-9]/\n'
        ),
    }
    params = [sampled(spec, seed, 64) for spec in specs.values() for seed in range(4)]
    answers = llm.chat([CHAT] * len(params), params)
    for answer, pattern in zip(answers, [p for p in specs for _ in range(4)], strict=True):
        assert answer.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, answer.outputs[0].text), answer.outputs[0].text


def test_other_rows_of_the_batch_are_bitwise_unchanged(llm: LLM) -> None:
    free = [sampled(None, seed) for seed in range(3)]
    guided = [sampled(Spec(json=schema(seed)), seed) for seed in range(3)]
    alone = [llm.chat(CHAT, params)[0].outputs[0] for params in (*free, *guided)]
    mixed = llm.chat([CHAT] * 6, [p for pair in zip(free, guided, strict=True) for p in pair])
    together = [mixed[i].outputs[0] for i in (0, 2, 4, 1, 3, 5)]
    assert [a.token_ids for a in alone] == [b.token_ids for b in together]


def test_the_same_from_an_engine_process(llm: LLM) -> None:
    params = [sampled(Spec(json=schema(seed)), seed) for seed in range(3)]
    with LLM("smollm2", num_kv_cells=2048, engine_process=True) as other:
        assert texts(other.chat([CHAT] * 3, params)) == texts(llm.chat([CHAT] * 3, params))
        with pytest.raises(RejectedError, match="unclosed group"):
            other.chat(CHAT, sampled(Spec(regex="("), 0))


def test_an_invalid_grammar_rejects_the_call_before_it_runs(llm: LLM) -> None:
    with pytest.raises(RejectedError, match="Unimplemented keys") as error:
        llm.chat([CHAT] * 2, [sampled(None, 0), sampled(Spec(json={"not": {}}), 0)])
    assert error.value.param == "structured_outputs.json"
    with pytest.raises(RejectedError, match="no text can complete it"):
        llm.chat(CHAT, sampled(Spec(grammar="start: start"), 0))


def folder(path: Path) -> Tokenizer:
    facts = dict.fromkeys(ModelInfo.__slots__)
    return load_tokenizer(ModelInfo(**{**facts, "path": str(path), "tokenizer": None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gguf", "folder"])
def test_grammars_use_the_bytes_of_the_tokenizer(name: str) -> None:
    """The token table of llguidance equals the tokenizer's, so a mask allows exactly the bytes of a text."""
    tokenizer = (
        folder(QWEN2) if name == "folder" else load_model_assets(load_config({"model": "smollm2"})).tokenizer
    )
    table = LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size + 5, eos_token=[0])
    for id in range(tokenizer.vocab_size):
        is_text = not tokenizer.id_to_bytes(id).startswith(b"\xff")  # llguidance marks special tokens with it
        assert table.is_special_token(id) == tokenizer.is_special(id) or not is_text
        if is_text and not tokenizer.is_special(id):
            assert table.decode_bytes([id]) == tokenizer.id_to_bytes(id)
