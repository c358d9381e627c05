"""SentencePiece tokenizers of GGUF files compared with the plain algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import decoders

from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import GgufTokenizer, ModelInfo
from llaisys.sampling_params import StructuredOutputsParams
from llaisys.text.gguf import build_gguf
from llaisys.text.tokenizer import Tokenizer, load_tokenizer

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = ["a", "b", "c", SPACE, "\u00e9"]


def gguf(pieces: list[str], **changes: Any) -> GgufTokenizer:
    """Return metadata: `<unk>` (0), `<s>` (1), `</s>` (2), bytes, letters, then `pieces`, best first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *pieces]
    n_fixed = 3 + 256
    stated: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_types": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - n_fixed)],
        "merges": [],
        "scores": [0.0] * (n_fixed + len(LETTERS)) + [float(-i) for i in range(len(pieces))],
        "add_space_prefix": True,
        "add_bos": False,
        "bos": 1,
        "eos": 2,
        "unk": 0,
        "chat_template": None,
    }
    return GgufTokenizer(**(stated | changes))


def plain(gguf: GgufTokenizer, text: str) -> list[int]:
    """Tokenize by the definition: merge the best adjacent pair, the leftmost one on a tie."""
    assert gguf.scores is not None
    entries = zip(gguf.tokens, gguf.scores, gguf.token_types, strict=True)
    scores = {token: score for token, score, kind in entries if kind in (NORMAL, USER_DEFINED)}
    ids = {token: id for id, token in enumerate(gguf.tokens)}
    symbols = list(((SPACE if gguf.add_space_prefix and text else "") + text).replace(" ", SPACE))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    out = []
    for symbol in symbols:
        out += [ids[symbol]] if symbol in scores else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return out


letters = st.text("abc \u00e9\u4f60\n", max_size=30)
pieces = st.lists(
    st.text("abc" + SPACE, min_size=2, max_size=4).filter(lambda piece: piece not in LETTERS),
    max_size=25,
    unique=True,
)


@given(text=st.text(alphabet=st.one_of(st.sampled_from("ab \n\u00e9"), st.characters(codec="utf-8"))))
def test_gemma4_ids_equal_those_of_its_tokenizer_json(text: str) -> None:
    """Gemma's tokenizer.json has the same model, and splits at spaces that the normalizer has replaced."""
    pairs = [("a", "b"), (SPACE, "a"), (SPACE, SPACE), (SPACE, "ab"), ("\n", "\n"), ("ab", "ab")]
    stated = gguf(["\n", *(left + right for left, right in pairs)])
    stated = replace(stated, model="gemma4", merges=[f"{a} {b}" for a, b in pairs], add_space_prefix=None)
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {token: id for id, token in enumerate(stated.tokens)},
        "merges": pairs,
    }
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    unspace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    original = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
                "pre_tokenizer": split,
                "decoder": {
                    "type": "Sequence",
                    "decoders": [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}],
                },
                "model": model,
            }
        )
    )
    ids = original.encode(text, add_special_tokens=False).ids
    built = build_gguf(stated)
    assert built.encode(text, add_special_tokens=False).ids == ids
    assert built.decode(ids) == original.decode(ids)


def test_gemma4_merges_that_are_no_tokens_are_rejected() -> None:
    stated = replace(gguf(["ab"]), model="gemma4", merges=["a b", "b c"], add_space_prefix=None)
    with pytest.raises(RejectedError, match="merges do not fit"):
        build_gguf(stated)


@given(pieces=pieces, text=letters, prefix=st.booleans())
def test_ids_equal_those_of_the_plain_algorithm(pieces: list[str], text: str, prefix: bool) -> None:
    stated = gguf(pieces, add_space_prefix=prefix)
    assert build_gguf(stated).encode(text, add_special_tokens=False).ids == plain(stated, text)


@given(pieces=pieces, text=letters, prefix=st.booleans())
def test_text_round_trips(pieces: list[str], text: str, prefix: bool) -> None:
    backend = build_gguf(gguf(pieces, add_space_prefix=prefix))
    assert backend.decode(backend.encode(text).ids) == text


@given(pieces=pieces, text=letters, prefix=st.booleans())
def test_tokens_are_fixed_bytes(pieces: list[str], text: str, prefix: bool) -> None:
    """A completion is streamed token by token, so a leading space is kept."""
    tokenizer = Tokenizer(build_gguf(gguf(pieces, add_space_prefix=prefix)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (" " if prefix and text else "") + text
    assert b"".join(map(tokenizer.id_to_bytes, ids)).decode() == (" " if prefix and text else "") + text


def test_byte_and_special_tokens() -> None:
    tokenizer = Tokenizer(build_gguf(gguf(["ab"])))
    assert tokenizer.id_to_bytes(3 + 0xE4) == b"\xe4"
    assert (tokenizer.id_to_bytes(2), tokenizer.is_special(2)) == (b"</s>", True)
    assert tokenizer.decode([2, 3 + 0x0A], skip_special_tokens=True) == "\n"


def test_an_unsupported_decoder_is_rejected_by_name() -> None:
    backend = build_gguf(gguf(["ab"]))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    with pytest.raises(UnsupportedError, match="Sequence of ByteFallback, Fuse"):
        Tokenizer(backend)


def test_a_better_score_wins_over_a_longer_token() -> None:
    stated = gguf(["bc", "ab", "abc"], add_space_prefix=False)
    tokens = build_gguf(stated).encode("abc").tokens
    assert tokens == ["abc"]
    stated = gguf(["bc", "ab", "cab"], add_space_prefix=False)
    assert build_gguf(stated).encode("abc").tokens == ["a", "bc"]


def test_control_tokens_are_not_merged_and_unused_tokens_never_produced() -> None:
    stated = gguf(["ab", "<tool>", "bc"], add_space_prefix=False)
    kinds = [*stated.token_types[:-3], UNUSED, USER_DEFINED, NORMAL]
    backend = build_gguf(gguf(["ab", "<tool>", "bc"], token_types=kinds, add_space_prefix=False))
    assert backend.encode("abc").tokens == ["a", "bc"]
    assert backend.encode("a<tool></s>").ids == [stated.tokens.index("a"), len(stated.tokens) - 2, 2]


def test_bos_is_added_if_the_file_requests_it(info: Callable[..., ModelInfo]) -> None:
    tokenizer = load_tokenizer(info(Path("x.gguf"), gguf(["ab"], add_bos=True)))
    assert tokenizer.encode("ab", add_special_tokens=True)[0] == 1
    assert tokenizer.encode("", add_special_tokens=True) == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"scores": None}, "score"), ({"scores": [0.0]}, "score")],
)
def test_scores_that_do_not_fit_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RejectedError, match=words):
        build_gguf(gguf(["ab"], **changes))


def test_an_overlong_token_is_rejected() -> None:
    with pytest.raises(RejectedError, match="token of 513 characters"):
        build_gguf(gguf(["a" * 513]))


def test_grammars_use_the_bytes_of_the_tokenizer() -> None:
    """The token table of llguidance equals that of the SentencePiece tokenizer."""
    made = Tokenizer(build_gguf(gguf([SPACE + "ab", "abc"])))
    table = LLTokenizer(made.to_json(), n_vocab=made.vocab_size + 3, eos_token=[2])
    for id in range(3, made.vocab_size):
        if made.id_to_bytes(id) != b"\xff":  # never valid in UTF-8
            assert table.decode_bytes([id]) == made.id_to_bytes(id)
    grammars = GrammarCompiler(GrammarTokenizer(made.to_json(), (2,), made.vocab_size + 3))
    matcher = grammars.compile(StructuredOutputsParams(choice=["abc ab", "xyz"]))
    ids = [id for id in range(3, made.vocab_size) if made.id_to_bytes(id) in (b"abc", b" ab")]
    assert matcher.try_consume_tokens(sorted(ids, key=made.id_to_bytes, reverse=True)) == 2
    assert matcher.is_accepting()
