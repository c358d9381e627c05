"""Builds the tokenizer that the metadata of a GGUF file describes.

`tokenizer.ggml.pre` only *names* a pre-tokenizer. The rules of `default` are from llama.cpp's
`src/llama-vocab.cpp`, which defines the name. The rules of the other names are from the
`tokenizer.json` of SmolLM2, Qwen2, Qwen3.5, Llama 3 and gpt-oss (OpenAI's o200k encoding). Any other name
is rejected, because a wrong pre-tokenizer gives plausible but wrong ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import GgufTokenizer
from llaisys.text.spm import build_spm, merges_by_score

VOCAB_MAX = 1 << 20
MERGES_MAX = 1 << 21
# `tokenizer.ggml.model`: merges of bytes; scores, or merges, of characters.
_MODELS = ("gpt2", "llama", "gemma4")

# Values of `tokenizer.ggml.token_type` (GGUF specification) that are matched in text before the merges.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Capitals begin a word.
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Qwen2, with combining marks as parts of words.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer. `splits` are applied in turn; matches and the text between them become words.

    `whole_words`: a word that is a token is kept whole (`ignore_merges`). `nfc`: text is composed first.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False


PRES = {
    "smollm": PreTokenizer((r"\p{N}", GPT2_SPLIT)),
    "qwen2": PreTokenizer((_TIKTOKEN % r"\p{N}",), nfc=True),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "llama-bpe": PreTokenizer((_TIKTOKEN % r"\p{N}{1,3}",), whole_words=True),
    # llama.cpp reads it as llama-bpe.
    "lfm2": PreTokenizer((_TIKTOKEN % r"\p{N}{1,3}",), whole_words=True),
    "gpt-4o": PreTokenizer((_O200K,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def build_gguf(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    """Return the `tokenizers` object for this metadata.

    Raises UnsupportedError naming an unknown `model` or `pre`, RejectedError for inconsistent metadata.
    """
    if gguf.model not in _MODELS:
        raise UnsupportedError(
            f"tokenizer.ggml.model is {gguf.model!r}; supported are {', '.join(_MODELS)} (BPE)", param="model"
        )
    pre = PRES.get(gguf.pre)
    if pre is None:
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {gguf.pre!r}; supported are {', '.join(PRES)}", param="model"
        )
    check_gguf(gguf)
    backend = byte_level(gguf, pre) if gguf.model == "gpt2" else _spm(gguf)
    add_tokens(backend, gguf)
    if gguf.add_bos and gguf.bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single="BOS $A", special_tokens=[("BOS", gguf.bos)]
        )
    return backend


def byte_level(gguf: GgufTokenizer, pre: PreTokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer of byte-level BPE, without special tokens. Raises RejectedError."""
    model = _model(gguf, [_merge(line) for line in gguf.merges], ignore_merges=pre.whole_words)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.NFC() if pre.nfc else None
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _spm(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    has_scores = gguf.model == "llama"
    merges = merges_by_score(gguf) if has_scores else [_merge(line) for line in gguf.merges]
    unk = None if gguf.unk is None else gguf.tokens[gguf.unk]
    model = _model(gguf, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    return build_spm(model, add_space_prefix=bool(gguf.add_space_prefix))


def check_gguf(gguf: GgufTokenizer) -> None:
    """Raise RejectedError for lists of impossible or different lengths, and for ids outside of them."""
    n_tokens = len(gguf.tokens)
    if not 0 < n_tokens <= VOCAB_MAX or len(gguf.merges) > MERGES_MAX:
        raise RejectedError(
            f"the GGUF has {n_tokens} tokens and {len(gguf.merges)} merges, "
            f"allowed are 1 to {VOCAB_MAX} and at most {MERGES_MAX}",
            param="model",
        )
    if len(gguf.token_types) != n_tokens:
        raise RejectedError(
            f"the GGUF has {n_tokens} tokens but {len(gguf.token_types)} token types", param="model"
        )
    if len(set(gguf.tokens)) != n_tokens:
        raise RejectedError("the GGUF lists a token twice, so its id is not known", param="model")
    for name, id in (("bos", gguf.bos), ("eos", gguf.eos), ("unknown", gguf.unk)):
        if id is not None and not 0 <= id < n_tokens:
            raise RejectedError(f"the GGUF's {name} token id {id} is not below {n_tokens}", param="model")


def _model(gguf: GgufTokenizer, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    vocab = {token: id for id, token in enumerate(gguf.tokens)}
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as e:  # `tokenizers` raises plain Exception (a part of a merge is not a token)
        raise RejectedError(f"the GGUF's merges do not fit its tokens: {e}", param="model") from e


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right or " " in right:
        raise RejectedError(f"the GGUF's merge {line!r} is not two tokens", param="model")
    return left, right


def add_tokens(backend: tokenizers.Tokenizer, gguf: GgufTokenizer) -> None:
    """Let the tokens that are no ordinary ones be matched in a text before it is divided."""
    backend.add_special_tokens(_added(gguf, lambda kind: kind in (_UNKNOWN, _CONTROL), special=True))
    backend.add_tokens(_added(gguf, lambda kind: kind == _USER_DEFINED, special=False))


def _added(gguf: GgufTokenizer, is_wanted: Callable[[int], bool], *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(gguf.tokens, gguf.token_types, strict=True)
        if is_wanted(kind) and token
    ]
