"""SentencePiece's BPE inside a GGUF file (`tokenizer.ggml.model` = llama): tokens with scores, no merges.

Text becomes characters with U+2581 for spaces; of all neighbours that together are a token, those whose token
has the highest score are joined, the leftmost of equal ones, until none are left; what is no token then
becomes its UTF-8 bytes' tokens (`<0x0A>`). That is BPE with every way to halve a token as a merge, ranked by
the token's score. Source: llama.cpp's `src/llama-vocab.cpp`, the program that defines the name.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers

from llaisys.errors import RejectedError
from llaisys.types import GgufTokenizer

SPACE = "\u2581"
# Characters of a token at most: every way to halve it is looked at.
PIECE_MAX = 512

# Values of `tokenizer.ggml.token_type` (GGUF specification) that text can become by joining.
_JOINED = (1, 4)


def build_spm(facts: GgufTokenizer) -> tokenizers.Tokenizer:
    """The `tokenizers` object without its added tokens. The facts' lists are of equal length.

    Raises RejectedError for a token of unlikely length or missing scores.
    """
    vocab = {token: id for id, token in enumerate(facts.tokens)}
    unk = None if facts.unk is None else facts.tokens[facts.unk]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(facts), unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", SPACE)
    unspace = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if facts.add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        backend.decoder = decoders.Sequence([*unspace, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = space
        backend.decoder = decoders.Sequence(unspace)
    return backend


def _merges(facts: GgufTokenizer) -> list[tuple[str, str]]:
    if facts.scores is None or len(facts.scores) != len(facts.tokens):
        raise RejectedError("the GGUF has not one score for each token", param="model")
    entries = zip(facts.tokens, facts.scores, facts.token_types, strict=True)
    pieces = {token: score for token, score, kind in entries if kind in _JOINED}
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
