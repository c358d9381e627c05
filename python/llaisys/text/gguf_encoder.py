"""Builds the tokenizer of an encoder from the metadata of a GGUF file: WordPiece, unigrams or byte-level BPE.

llama.cpp stores no normalizer and no template of special tokens; they are those of the family in
transformers: BERT, XLM-RoBERTa (SentencePiece's unigrams, `t5` in GGUF) and ModernBERT. Source: its
`conversion/bert.py`.
"""

from __future__ import annotations

import re

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import GgufTokenizer
from llaisys.text.charsmap import check_charsmap
from llaisys.text.gguf import GPT2_SPLIT, PRES, PreTokenizer, add_tokens, byte_level, check_gguf
from llaisys.text.spm import SPACE, scores_of

_PRES = {"modern-bert": PreTokenizer((GPT2_SPLIT,), nfc=True), "qwen2": PRES["qwen2"]}
# A value of `tokenizer.ggml.token_type` (GGUF specification).
_NORMAL = 1
_CAPITAL = re.compile("[A-Z]")


def build_gguf_encoder(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    """Return the `tokenizers` object for this metadata, which the core has checked.

    Raises UnsupportedError naming an unknown `model` or `pre`, RejectedError for inconsistent metadata.
    """
    check_gguf(gguf)
    match gguf.model:
        case "bert":
            backend = _word_piece(gguf)
            pair = "BEGIN:0 $A:0 END:0 $B:1 END:1"
        case "t5":
            backend = _unigram(gguf)
            pair = "BEGIN $A END END $B:0 END"
        case "gpt2" if gguf.pre in _PRES:
            backend = byte_level(gguf, _PRES[gguf.pre])
            pair = "BEGIN $A END $B:0 END"
        case _:
            raise UnsupportedError(
                f"the tokenizer of a GGUF encoder is {gguf.model!r} with pre {gguf.pre!r}; supported are "
                f"bert, t5, and gpt2 with {' or '.join(_PRES)}",
                param="model",
            )
    add_tokens(backend, gguf)
    special = [("BEGIN", _required(gguf.bos, "begin")), ("END", _required(gguf.eos, "end"))]
    backend.post_processor = processors.TemplateProcessing("BEGIN $A END", pair, special)
    return backend


def _required(token_id: int | None, what: str) -> int:
    if token_id is None:
        raise RejectedError(f"the GGUF of an encoder names no {what} token", param="model")
    return token_id


def _word_piece(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    """The converter marks tokens that begin a word, with U+2581, instead of those that continue one."""
    vocab, is_cased = {}, False
    for id, (token, kind) in enumerate(zip(gguf.tokens, gguf.token_types, strict=True)):
        is_bracketed = token.startswith("[") and token.endswith("]")
        begins, piece = token.startswith(SPACE), token.removeprefix(SPACE)
        vocab[piece if begins or is_bracketed or kind != _NORMAL else f"##{piece}"] = id
        is_cased |= kind == _NORMAL and not is_bracketed and _CAPITAL.search(token) is not None
    if len(vocab) != len(gguf.tokens):
        raise RejectedError("the GGUF lists a token twice, so its id is not known", param="model")
    unk = "[UNK]" if gguf.unk is None else gguf.tokens[gguf.unk]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=unk))
    # The file does not say whether text is lowercased: a vocabulary without capitals is of such text.
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _unigram(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    vocab = list(zip(gguf.tokens, scores_of(gguf), strict=True))
    backend = tokenizers.Tokenizer(models.Unigram(vocab, gguf.unk, byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    if gguf.precompiled_charsmap:
        charsmap = bytes(gguf.precompiled_charsmap)
        check_charsmap(charsmap)
        try:
            steps.append(normalizers.Precompiled(charsmap))
        except Exception as e:  # `tokenizers` raises plain Exception
            raise RejectedError(f"the GGUF's precompiled_charsmap cannot be read: {e}", param="model") from e
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    scheme = "always" if gguf.add_space_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    backend.decoder = decoders.Metaspace(SPACE, scheme)
    return backend
