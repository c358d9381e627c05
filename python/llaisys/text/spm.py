"""Builds SentencePiece's BPE tokenizer from a GGUF file (`tokenizer.ggml.model` = llama).

Such a file has tokens with scores, and no merges. Text becomes characters, with U+2581 for spaces. Adjacent
pieces that together form a token are merged: highest score first, leftmost on a tie. A remaining piece that
is not a token becomes its UTF-8 bytes' tokens (`<0x0A>`). This equals BPE with every split of a token into
two tokens as a merge, ranked by the token's score. Source: llama.cpp's `src/llama-vocab.cpp`.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers

from llaisys.errors import RejectedError
from llaisys.model_info import GgufTokenizer

SPACE = "\u2581"
# The longest token in characters; building the merges tries every split of it.
PIECE_MAX = 512

# Values of `tokenizer.ggml.token_type` (GGUF specification) that merging can produce.
_MERGED_TYPES = (1, 4)


def build_spm(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    """Return the `tokenizers` object without added tokens. The lists in `gguf` have equal lengths.

    Raises RejectedError for a token above `PIECE_MAX` characters or missing scores.
    """
    vocab = {token: id for id, token in enumerate(gguf.tokens)}
    unk = None if gguf.unk is None else gguf.tokens[gguf.unk]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(gguf), unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", SPACE)
    unspace = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        backend.decoder = decoders.Sequence([*unspace, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = space
        backend.decoder = decoders.Sequence(unspace)
    return backend


def _merges(gguf: GgufTokenizer) -> list[tuple[str, str]]:
    if gguf.scores is None or len(gguf.scores) != len(gguf.tokens):
        raise RejectedError("the GGUF's scores do not match its tokens one to one", param="model")
    entries = zip(gguf.tokens, gguf.scores, gguf.token_types, strict=True)
    pieces = {token: score for token, score, kind in entries if kind in _MERGED_TYPES}
    longest = max(map(len, pieces), default=0)
    if longest > PIECE_MAX:
        raise RejectedError(
            f"the GGUF has a token of {longest} characters, at most {PIECE_MAX} are allowed", param="model"
        )
    halves = [
        (-score, piece[:i], piece[i:])
        for piece, score in pieces.items()
        for i in range(1, len(piece))
        if piece[:i] in pieces and piece[i:] in pieces
    ]
    halves.sort(key=lambda half: half[0])
    return [(left, right) for _, left, right in halves]
