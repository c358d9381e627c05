"""Tokenizers of encoders from GGUF metadata: rules that the file does not state, and hostile tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import GgufTokenizer, ModelInfo
from llaisys.text.gguf_encoder import build_gguf_encoder
from llaisys.text.tokenizer import load_tokenizer

CHARSMAP = (Path(__file__).parents[2] / "data" / "text" / "charsmap.bin").read_bytes()
UNIGRAMS = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581fi", "n", "e", "\u2581A", "f", "i", "A"]


def word_piece(*tokens: str, **changes: Any) -> GgufTokenizer:
    """Return a file's WordPiece tokenizer: four control tokens and `tokens`, as the converter writes them."""
    whole = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *tokens]
    kinds = [3] * 4 + [1] * len(tokens)
    own = GgufTokenizer("bert", "default", whole, kinds, [], True, 2, 3, 1, None)
    return replace(own, **changes)


def unigram(**changes: Any) -> GgufTokenizer:
    scores = [0.0] * 4 + [-float(i) for i in range(1, len(UNIGRAMS) - 3)]
    own = GgufTokenizer(
        "t5", "default", UNIGRAMS, [3, 3, 3, 2] + [1] * 8, [], True, 0, 2, 3, None, scores, True
    )
    return replace(own, **changes)


def pieces(tokenizer: GgufTokenizer, text: str) -> list[str]:
    return list(build_gguf_encoder(tokenizer).encode(text, add_special_tokens=False).tokens)


def test_a_vocabulary_without_capitals_is_of_lowercased_text() -> None:
    tokens = ("\u2581cafe", "\u2581ca", "fé", "fe")
    assert pieces(word_piece(*tokens), "CAFÉ café") == ["cafe", "cafe"]
    # One with a capital is not; accents stay, too.
    assert pieces(word_piece(*tokens, "\u2581The"), "The café cafe") == [
        "The",
        "ca",
        "##fé",
        "cafe",
    ]
    assert pieces(word_piece(*tokens, "\u2581The"), "CAFE") == ["[UNK]"]
    # Control tokens and reserved ones have capitals in either.
    assert pieces(word_piece(*tokens, "[UNUSED1]"), "CAFE") == ["cafe"]


def test_a_special_token_in_a_text_becomes_its_id() -> None:
    backend = build_gguf_encoder(word_piece("\u2581a"))
    assert backend.encode("a [SEP] a").ids == [2, 4, 3, 4, 3]
    assert backend.encode("a", "a").type_ids == [0, 0, 0, 1, 1]


def test_the_table_of_sentencepiece_replaces_characters() -> None:
    """As tokenizers normalizes with the same table in a `tokenizer.json`."""
    text = "\ufb01ne \uff21\u3000fine  A"
    plain = pieces(unigram(), text)
    assert pieces(unigram(precompiled_charsmap=list(CHARSMAP)), text) == [
        *("\u2581fi", "n", "e", "\u2581A", "\u2581fi", "n", "e", "\u2581A")
    ]
    assert plain != pieces(unigram(precompiled_charsmap=list(CHARSMAP)), text)
    model = models.Unigram(list(zip(UNIGRAMS, unigram().scores or [], strict=True)), 3, byte_fallback=False)
    theirs = Tokenizer(model)
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    theirs.normalizer = normalizers.Sequence([normalizers.Precompiled(CHARSMAP), spaces])
    theirs.pre_tokenizer = pre_tokenizers.Metaspace()
    assert theirs.encode(text).tokens == pieces(unigram(precompiled_charsmap=list(CHARSMAP)), text)


def test_without_a_prefix_the_first_word_has_no_space() -> None:
    assert pieces(unigram(), "fi") == ["\u2581fi"]
    assert pieces(unigram(add_space_prefix=False), "fi") == ["f", "i"]


@pytest.mark.parametrize(
    ("tokenizer", "error", "names"),
    [
        (word_piece("\u2581a", model="llama"), UnsupportedError, "'llama'"),
        (word_piece("\u2581a", model="gpt2", pre="smollm"), UnsupportedError, "'smollm'"),
        (word_piece("\u2581a", "\u2581a"), RejectedError, "twice"),
        (word_piece("a", "\u2581##a"), RejectedError, "twice"),
        (word_piece("\u2581a", bos=None), RejectedError, "begin token"),
        (word_piece("\u2581a", eos=None), RejectedError, "end token"),
        (word_piece("\u2581a", eos=5), RejectedError, "eos token id 5"),
        (word_piece("\u2581a", token_types=[1]), RejectedError, "token types"),
        (unigram(scores=None), RejectedError, "scores"),
        (unigram(scores=[0.0]), RejectedError, "scores"),
        (unigram(precompiled_charsmap=[1]), RejectedError, "precompiled_charsmap has 1 bytes"),
        (unigram(precompiled_charsmap=list(CHARSMAP[:500])), RejectedError, "has 500 bytes"),
        (unigram(precompiled_charsmap=[0, 0, 0, 0, *b"x" * 65]), RejectedError, "by 65 bytes"),
    ],
)
def test_wrong_metadata_is_refused_by_name(
    tokenizer: GgufTokenizer, error: type[Exception], names: str
) -> None:
    with pytest.raises(error, match=names):
        build_gguf_encoder(tokenizer)


@pytest.mark.parametrize("nested", [False, True])
def test_a_table_that_multiplies_a_text_is_refused_in_a_folder(
    nested: bool, tmp_path: Path, info: Callable[..., ModelInfo]
) -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0)], 0, byte_fallback=False))
    # The trie of the table is kept, and its replacements are much longer.
    start = 4 + int.from_bytes(CHARSMAP[:4], "little")
    hostile: normalizers.Normalizer = normalizers.Precompiled(CHARSMAP[:start] + b"x" * 10_000 + b"\0")
    if nested:
        hostile = normalizers.Sequence([normalizers.Lowercase(), normalizers.Sequence([hostile])])
    backend.normalizer = hostile
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), "utf-8")
    with pytest.raises(RejectedError, match="by 10000 bytes"):
        load_tokenizer(replace(info(tmp_path), is_encoder=True))
    state = json.loads(backend.to_str())
    state["normalizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), "utf-8")
    assert load_tokenizer(replace(info(tmp_path), is_encoder=True))
