"""Builds SentencePiece's BPE tokenizer from a GGUF file (`tokenizer.ggml.model` = llama or gemma4).

Text becomes characters, with U+2581 for spaces. Adjacent pieces that together form a token are merged. A
remaining piece that is not a token becomes its UTF-8 bytes' tokens (`<0x0A>`). Gemma 4's file has merges. The
other one has tokens with scores instead: the highest score is merged first, the leftmost on a tie. This
equals BPE with every split of a token into two tokens as a merge, ranked by the token's score. Source:
llama.cpp's `src/llama-vocab.cpp`.
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


def build_spm(model: models.BPE, *, add_space_prefix: bool) -> tokenizers.Tokenizer:
    """Return the `tokenizers` object of a model of characters and bytes, without added tokens."""
    backend = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", SPACE)
    unspace = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        backend.decoder = decoders.Sequence([*unspace, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = space
        backend.decoder = decoders.Sequence(unspace)
    return backend


def scores_of(gguf: GgufTokenizer) -> list[float]:
    """Return the score of each token. Raises RejectedError if they are missing or are not one for each."""
    if gguf.scores is None or len(gguf.scores) != len(gguf.tokens):
        raise RejectedError("the GGUF's scores do not match its tokens one to one", param="model")
    return gguf.scores


def merges_by_score(gguf: GgufTokenizer) -> list[tuple[str, str]]:
    """Return the merges that follow from the scores. The other lists in `gguf` have equal lengths.

    Raises RejectedError for a token above `PIECE_MAX` characters or missing scores.
    """
    entries = zip(gguf.tokens, scores_of(gguf), gguf.token_types, strict=True)
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
