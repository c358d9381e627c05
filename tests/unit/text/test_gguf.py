"""GGUF tokenizers produce the ids of the tokenizer.json from which they were made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import GgufTokenizer, ModelInfo
from llaisys.text import gguf
from llaisys.text.gguf import build_gguf
from llaisys.text.tokenizer import Tokenizer, load_tokenizer

MakeGguf = Callable[..., GgufTokenizer]


@pytest.fixture(scope="module")
def from_gguf(qwen_gguf: GgufTokenizer, info: Callable[..., ModelInfo]) -> Tokenizer:
    return load_tokenizer(info(Path("qwen.gguf"), qwen_gguf))


@given(text=st.text())
def test_qwen2_ids_equal_those_of_its_tokenizer_json(
    qwen: Tokenizer, from_gguf: Tokenizer, text: str
) -> None:
    assert from_gguf.encode(text, add_special_tokens=True) == qwen.encode(text, add_special_tokens=True)


@pytest.mark.parametrize(
    "text",
    [
        "It's 2024!\n\n  x = 10_000\t#\u4f60\u597d\u4e16\u754c \U0001f980",
        "<|im_start|>user\ncafe\u0301<|im_end|>\n",
        " \u00a0 \u3000x",
        "",
    ],
)
def test_qwen2_on_chosen_texts(qwen: Tokenizer, from_gguf: Tokenizer, text: str) -> None:
    ids = qwen.encode(text, add_special_tokens=False)
    assert from_gguf.encode(text, add_special_tokens=False) == ids
    assert from_gguf.decode(ids, skip_special_tokens=False) == qwen.decode(ids, skip_special_tokens=False)


def test_the_listed_tokens_are_those_of_the_tokenizer(qwen_gguf: GgufTokenizer, from_gguf: Tokenizer) -> None:
    read_back = Tokenizer(build_gguf(qwen_gguf))
    assert from_gguf.vocab_size == read_back.vocab_size
    for id in range(read_back.vocab_size):
        assert from_gguf.vocab_text(id) == read_back.vocab_text(id)


def words(pre: str, text: str, small: MakeGguf) -> list[str]:
    pieces = build_gguf(small(pre=pre)).pre_tokenizer.pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in pieces]


@given(text=st.text())
def test_smollm_pretokenizes_like_its_tokenizer_json(small: MakeGguf, text: str) -> None:
    """SmolLM2 splits digits one by one, then words like GPT-2."""
    original = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert build_gguf(small(pre="smollm")).pre_tokenizer.pre_tokenize_str(text) == original.pre_tokenize_str(
        text
    )


@pytest.mark.parametrize(
    ("pre", "text", "want"),
    [
        ("smollm", "We've 123  x", ["We", "'ve", " ", "1", "2", "3", " ", " x"]),
        ("qwen2", "WE'VE 123  x\n", ["WE", "'VE", " ", "1", "2", "3", " ", " x", "\n"]),
        # A combining mark stays with its letter.
        ("qwen2", "We\u0323'VE 1", ["We", "\u0323'", "VE", " ", "1"]),
        ("qwen35", "We\u0323'VE 12  x\n", ["We\u0323", "'VE", " ", "1", "2", " ", " x", "\n"]),
        ("llama-bpe", "WE'VE 12345  x.\n", ["WE", "'VE", " ", "123", "45", " ", " x", ".\n"]),
        ("lfm2", "WE'VE 12345  x.\n", ["WE", "'VE", " ", "123", "45", " ", " x", ".\n"]),
        ("gpt-4o", "WeLl'VE 12345  x/y./\n", ["We", "Ll'VE", " ", "123", "45", " ", " x", "/y", "./\n"]),
        ("default", "We've $12345", ["We", "'", "ve", " ", "$", "123", "45"]),
    ],
)
def test_each_pretokenizer_splits_in_its_own_way(
    pre: str, text: str, want: list[str], small: MakeGguf
) -> None:
    assert words(pre, text, small) == want


def test_llama_bpe_keeps_a_word_that_is_a_token(small: MakeGguf) -> None:
    """No sequence of merges produces `abc`; only a tokenizer that looks up whole words finds it."""
    gguf = small(pre="llama-bpe", merges=[])
    assert build_gguf(gguf).encode("abc").ids == [257]
    assert len(build_gguf(small(pre="default", merges=[])).encode("abc").ids) == 3


def test_control_tokens_are_special_and_user_defined_ones_are_not(tiny: Tokenizer) -> None:
    assert tiny.encode("<|end|><tool>", add_special_tokens=False) == [258, 259]
    assert tiny.is_special(258)
    assert not tiny.is_special(259)
    assert tiny.decode([258, 259], skip_special_tokens=True) == "<tool>"


def test_bos_is_added_if_the_file_requests_it(small: MakeGguf, info: Callable[..., ModelInfo]) -> None:
    tokenizer = load_tokenizer(info(Path("x.gguf"), small(add_bos=True)))
    assert tokenizer.encode("abc", add_special_tokens=True) == [258, 257]
    assert tokenizer.encode("", add_special_tokens=True) == [258]
    assert tokenizer.encode("abc", add_special_tokens=False) == [257]


@pytest.mark.parametrize(
    ("field", "value"), [("model", "t5"), ("model", "bert"), ("pre", "tekken"), ("pre", "")]
)
def test_an_unsupported_tokenizer_is_rejected_by_name(small: MakeGguf, field: str, value: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tokenizer.ggml.{field} is {value!r}"):
        build_gguf(small(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"token_types": [1]}, "1 token types"),
        ({"merges": ["a"]}, "'a' is not two tokens"),
        ({"merges": ["a b c"]}, "'a b c' is not two tokens"),
        ({"merges": ["zz b"]}, "merges do not fit"),
        ({"bos": 260}, "bos token id 260"),
        ({"eos": -1}, "eos token id -1"),
    ],
)
def test_inconsistent_metadata_is_rejected(small: MakeGguf, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RejectedError, match=words):
        build_gguf(small(**changes))


def test_a_duplicate_token_is_rejected(small: MakeGguf) -> None:
    tokens = small().tokens
    with pytest.raises(RejectedError, match="twice"):
        build_gguf(small(tokens=[*tokens[:-1], tokens[0]]))


def test_counts_above_the_limits_are_rejected(small: MakeGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "MERGES_MAX", 1)
    with pytest.raises(RejectedError, match="2 merges"):
        build_gguf(small())
    monkeypatch.setattr(gguf, "VOCAB_MAX", 259)
    with pytest.raises(RejectedError, match="260 tokens"):
        build_gguf(small(merges=[]))
