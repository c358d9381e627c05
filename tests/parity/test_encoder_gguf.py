"""Encoders in GGUF files: the bits and the token ids of their folders, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llaisys import LLM
from llaisys.engine.worker import inspect_model
from llaisys.errors import LlaisysError, RejectedError, UnsupportedError
from llaisys.text.tokenizer import Tokenizer, load_tokenizer
from parity.encoder_gguf import write_encoder
from parity.test_encoders import BERT, ENCODERS, MODERN, XLM_R, encode, golden, opened
from parity.test_goldens import GOLDENS

TEXTS = [
    "Where is the Eiffel Tower?",
    "  two  spaces, café and 北京\n",
    "lower UPPER 1234 ... \U0001f980 unbelievably",
]


def tokenizers_of(folder: str, path: Path) -> tuple[Tokenizer, Tokenizer]:
    ours, theirs = (load_tokenizer(inspect_model(each)) for each in (path, GOLDENS / folder))
    return ours, theirs


@pytest.mark.parametrize("folder", ENCODERS)
def test_a_file_has_the_bits_of_its_folder(folder: str, tmp_path: Path) -> None:
    inputs = golden(folder)
    prompts = [each["prompt"] for each in inputs]
    types = [each["types"] for each in inputs] if folder == BERT else None
    path = write_encoder(tmp_path / "model.gguf", GOLDENS / folder)
    with opened(GOLDENS / folder) as one, opened(path) as two:
        want, want_scores = encode(one, prompts, types)
        got, scores = encode(two, prompts, types)
    assert [rows.tobytes() for rows in got] == [rows.tobytes() for rows in want]
    assert (scores is None) == (want_scores is None)
    assert scores is None or scores.tobytes() == want_scores.tobytes()  # type: ignore[union-attr]


@pytest.mark.parametrize("folder", ENCODERS)
def test_texts_and_pairs_have_the_ids_of_the_folder(folder: str, tmp_path: Path) -> None:
    ours, theirs = tokenizers_of(folder, write_encoder(tmp_path / "model.gguf", GOLDENS / folder))
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, special)
        assert ours.encode_pair(text, TEXTS[0]) == theirs.encode_pair(text, TEXTS[0])
        assert ours.truncate(ours.encode(text, False), 4, "right") == theirs.truncate(
            theirs.encode(text, False), 4, "right"
        )


@pytest.mark.parametrize("folder", [BERT, MODERN])
def test_embeddings_are_pooled_as_the_file_says(folder: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "model.gguf", GOLDENS / folder)
    with LLM(str(path), dtype="float32") as ours, LLM(str(GOLDENS / folder), dtype="float32") as theirs:
        got, want = (llm.embed(TEXTS, use_tqdm=False) for llm in (ours, theirs))
    for one, two in zip(got, want, strict=True):
        assert one.prompt_token_ids == two.prompt_token_ids
        assert one.outputs.embedding == two.outputs.embedding


def test_a_reranker_scores_pairs(tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "model.gguf", GOLDENS / XLM_R)
    with LLM(str(path), dtype="float32") as ours, LLM(str(GOLDENS / XLM_R), dtype="float32") as theirs:
        got, want = (llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False) for llm in (ours, theirs))
    assert [each.outputs.score for each in got] == [each.outputs.score for each in want]


def test_quantized_matrices_stay_quantized(tmp_path: Path) -> None:
    """BERT's feed-forward output projection has rows of three blocks; the other rows are no whole blocks."""
    path = write_encoder(tmp_path / "model.gguf", GOLDENS / BERT, quantize=True)
    whole = write_encoder(tmp_path / "whole.gguf", GOLDENS / BERT)
    assert inspect_model(path).packed_bytes["auto"] < inspect_model(whole).packed_bytes["auto"]
    prompts = [each["prompt"] for each in golden(BERT)]
    with opened(path, dtype="auto") as packed, opened(path, dtype="float32") as exact:
        (got, _), (want, _) = encode(packed, prompts), encode(exact, prompts)
        alone = [encode(packed, [prompt])[0][0] for prompt in prompts]
    for one, two, three in zip(got, want, alone, strict=True):
        # Activations are rounded to 8 bits: about 1/127 of the largest of a block.
        assert 0 < np.abs(one - two).max() < 0.05 * np.abs(two).max()
        assert one.tobytes() == three.tobytes()


@pytest.mark.parametrize(
    ("folder", "drop", "changes", "error", "names"),
    [
        (BERT, (), {"general__type": "adapter"}, UnsupportedError, "adapter"),
        (BERT, (), {"bert__attention__causal": True}, UnsupportedError, "causal"),
        (BERT, ("bert.block_count",), {}, RejectedError, "bert.block_count"),
        (BERT, (), {"bert__block_count": 3}, RejectedError, "blk.2"),
        (BERT, (), {"bert__block_count": 1}, RejectedError, "blk.1"),
        (BERT, (), {"bert__block_count": 10**6}, RejectedError, "number of layers"),
        (BERT, (), {"bert__context_length": 255}, RejectedError, "position_embd"),
        (BERT, (), {"bert__attention__head_count": 0}, RejectedError, "number of heads"),
        (BERT, ("bert.attention.layer_norm_epsilon",), {}, RejectedError, "layer_norm_epsilon"),
        (BERT, (), {"tokenizer__ggml__token_type_count": 3}, RejectedError, "token_types"),
        (BERT, (), {"tokenizer__ggml__model": "llama"}, UnsupportedError, "bert, t5, gpt2"),
        (BERT, (), {"tokenizer__ggml__add_bos_token": False}, UnsupportedError, "without begin"),
        (BERT, ("tokenizer.ggml.cls_token_id",), {}, RejectedError, "bos_token_id"),
        (BERT, ("tokenizer.ggml.seperator_token_id",), {}, RejectedError, "eos_token_id"),
        (BERT, (), {"tokenizer__ggml__cls_token_id": 600}, RejectedError, "begin token"),
        (BERT, ("blk.1.ffn_up.bias",), {}, RejectedError, "blk.1.ffn_up.bias"),
        (XLM_R, ("cls.weight", "cls.bias"), {}, UnsupportedError, "XLMRobertaForSequenceClassification"),
        (XLM_R, ("cls.output.bias",), {}, RejectedError, "cls.output.bias"),
        (XLM_R, ("tokenizer.ggml.scores",), {}, RejectedError, "scores"),
        (XLM_R, (), {"tokenizer__ggml__precompiled_charsmap": "x"}, RejectedError, "array of bytes"),
        (MODERN, (), {"tokenizer__ggml__pre": "smollm"}, UnsupportedError, "modern-bert"),
        (MODERN, (), {"modern-bert__rope__freq_base": 0.0}, RejectedError, "base of the rotary"),
        (MODERN, (), {"modern-bert__attention__sliding_window_pattern": 0}, RejectedError, "every_n_layers"),
    ],
)
def test_what_a_file_must_not_be_is_refused_by_name(
    folder: str,
    drop: tuple[str, ...],
    changes: dict[str, Any],
    error: type[LlaisysError],
    names: str,
    tmp_path: Path,
) -> None:
    path = write_encoder(tmp_path / "model.gguf", GOLDENS / folder, drop=drop, **changes)
    with pytest.raises(error, match=names):
        inspect_model(path)
