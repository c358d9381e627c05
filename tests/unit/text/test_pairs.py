"""Prompts of rerankers: a query and a document with the tokens around them, cut to a number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from fakes import text
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo
from llaisys.text.pooling_type import model_normalizes
from llaisys.text.reranker import INSTRUCTION, load_reranker
from llaisys.text.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[2] / "data" / "goldens"
Info = Callable[..., ModelInfo]


def tokenizer(folder: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_file(str(GOLDENS / folder / "tokenizer.json"))
    return Tokenizer(backend, is_encoder=True)


@pytest.mark.parametrize(
    ("folder", "n_special", "has_types"),
    [("bert_embed_f32", 3, True), ("xlm_roberta_rerank_f16", 4, False), ("modernbert_embed_bf16", 3, False)],
)
def test_a_pair_has_the_tokenizers_special_tokens(folder: str, n_special: int, has_types: bool) -> None:
    made = tokenizer(folder)
    first, second = "what is a cache?", "A cache keeps what was computed."
    a, b = (made.encode(each, add_special_tokens=False) for each in (first, second))
    pair = made.encode_pair(first, second)
    assert len(pair.ids) == len(a) + len(b) + n_special
    assert pair.ids[1 : len(a) + 1] == a
    assert pair.ids[-len(b) - 1 : -1] == b
    assert pair.second_segment == (len(a) + 2 if has_types else None)


@pytest.mark.parametrize("n_kept", [5, 6, 9, 12, 20, 100])
def test_the_longer_text_of_a_pair_is_cut_first(n_kept: int) -> None:
    made = tokenizer("bert_embed_f32")
    first, second = "is it so", "a b c d e f g h i j k l m n"
    a, b = (made.encode(each, add_special_tokens=False) for each in (first, second))
    ids = made.encode_pair(first, second, n_kept).ids
    n_left = min(n_kept, len(a) + len(b) + 3) - 3
    n_a, n_b = len(a), len(b)
    while n_a + n_b > n_left:
        n_a, n_b = (n_a - 1, n_b) if n_a > n_b else (n_a, n_b - 1)
    assert len(ids) == n_left + 3
    assert ids[1 : n_a + 1] == a[:n_a]
    assert ids[n_a + 2 : -1] == b[:n_b]


def test_a_pair_that_would_be_empty_is_rejected() -> None:
    with pytest.raises(RejectedError, match="allow at least 5"):
        tokenizer("bert_embed_f32").encode_pair("a", "b", 4)


def test_a_truncated_text_keeps_its_special_tokens() -> None:
    made = tokenizer("bert_embed_f32")
    ids = made.encode("a b c d e f", add_special_tokens=False)
    whole = made.encode("a b c d e f", add_special_tokens=True)
    assert made.truncate(ids, len(whole), "left") == whole
    assert made.truncate(ids, 5, "left") == [whole[0], *ids[-3:], whole[-1]]
    assert made.truncate(ids, 5, "right") == [whole[0], *ids[:3], whole[-1]]
    with pytest.raises(RejectedError, match="2 special tokens"):
        made.truncate(ids, 2, "right")


def test_decoding_of_an_encoders_tokenizer() -> None:
    made = tokenizer("bert_embed_f32")
    ids = made.encode("hello there", add_special_tokens=True)
    assert made.decode(ids, skip_special_tokens=True) == "hello there"
    assert made.decode(ids, skip_special_tokens=False) == "[CLS] hello there [SEP]"


def folder(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


def test_a_yes_no_reranker(tmp_path: Path, info: Info) -> None:
    made = text.tokenizer()
    reranker = load_reranker(
        info(folder(tmp_path, classifier_from_token=["n", "y"])), made, "auto", "some-model"
    )
    assert reranker is not None
    assert reranker.token_ids == (made.token_id("n"), made.token_id("y"))
    body = reranker.body("what", "it is", None)
    assert body == f"<Instruct>: {INSTRUCTION}\n<Query>: what\n<Document>: it is"
    assert reranker.body("q", "d", "Find").startswith("<Instruct>: Find\n")
    whole = reranker.prompt(made.encode(body, add_special_tokens=False), None)
    written = made.decode(whole, skip_special_tokens=False)
    assert written.startswith("<|im_start|>system\nJudge whether the Document meets")
    assert written.endswith(f"{body}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    n_fixed = len(reranker.prefix_ids) + len(reranker.suffix_ids)
    cut = reranker.prompt([1, 2, 3, 4], n_fixed + 2)
    assert cut == [*reranker.prefix_ids, 1, 2, *reranker.suffix_ids]
    with pytest.raises(RejectedError, match=f"own prompt has {n_fixed} tokens"):
        reranker.prompt([1, 2], n_fixed)


def test_which_models_are_yes_no_rerankers(tmp_path: Path, info: Info) -> None:
    made, plain = text.tokenizer(), info(folder(tmp_path))
    assert load_reranker(plain, made, "auto", "Qwen3-0.6B") is None
    assert load_reranker(plain, made, "cosine", "Qwen3-Reranker-0.6B") is None
    for score_type, name in (("auto", "Qwen/Qwen3-Reranker-0.6B"), ("yes_no", "mine")):
        with pytest.raises(UnsupportedError, match="no tokens 'no' and 'yes'"):
            load_reranker(plain, made, score_type, name)
    headless = replace(plain, generates=False)
    assert load_reranker(headless, made, "auto", "Qwen3-Reranker-0.6B") is None
    with pytest.raises(UnsupportedError, match="yes_no needs a model that generates text"):
        load_reranker(headless, made, "yes_no", "x")
    with pytest.raises(UnsupportedError, match="cosine needs embeddings"):
        load_reranker(replace(headless, has_score_head=True), made, "cosine", "x")
    for wrong in ("yes", ["yes"], ["no", 1]):
        with pytest.raises(RejectedError, match="classifier_from_token"):
            load_reranker(info(folder(tmp_path, classifier_from_token=wrong)), made, "auto", "x")


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
        ({"sentence_transformers": {"version": "5"}}, True),
    ],
)
def test_the_activation_of_a_score_head(
    tmp_path: Path, info: Info, config: dict[str, Any], want: bool
) -> None:
    assert model_normalizes(replace(info(folder(tmp_path, **config)), has_score_head=True)) == want


def test_another_activation_is_refused_by_name(tmp_path: Path, info: Info) -> None:
    config = {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}
    with pytest.raises(UnsupportedError, match="'Tanh'"):
        model_normalizes(replace(info(folder(tmp_path, **config)), has_score_head=True))
