"""The tokenizer inside a GGUF file, built from the facts that its metadata states.

`tokenizer.ggml.pre` only *names* how text is cut into words before the merges; the rules behind the four
names below are those of the original tokenizers (tokenizer.json of SmolLM2, Qwen2 and Llama 3) and, for
`default`, of llama.cpp's `src/llama-vocab.cpp`, the program that defines the name. Another name is refused:
a wrong cut gives plausible but wrong ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.text.spm import build_spm
from llaisys.types import GgufTokenizer

VOCAB_MAX = 1 << 20
MERGES_MAX = 1 << 21

# Values of `tokenizer.ggml.token_type` (GGUF specification) that are matched in text before the merges.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Pre:
    """One way to cut: `cuts` are applied in turn, each keeping matches and what lies between them as words.

    `whole_words`: a word that is a token stays one, whatever the merges say. `nfc`: text is composed first.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    nfc: bool = False


_PRE = {
    "smollm": _Pre((r"\p{N}", _GPT2)),
    "qwen2": _Pre((_TIKTOKEN % r"\p{N}",), nfc=True),
    "llama-bpe": _Pre((_TIKTOKEN % r"\p{N}{1,3}",), whole_words=True),
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def build_gguf(facts: GgufTokenizer) -> tokenizers.Tokenizer:
    """The `tokenizers` object that these facts describe.

    Raises UnsupportedError naming an unknown `model` or `pre`, RejectedError if the facts contradict each
    other.
    """
    if facts.model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"tokenizer.ggml.model is {facts.model!r}; supported are 'gpt2' and 'llama' (BPE)", param="model"
        )
    pre = _PRE.get(facts.pre)
    if pre is None:
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {facts.pre!r}; supported are {', '.join(_PRE)}", param="model"
        )
    _check(facts)
    backend = build_spm(facts) if facts.model == "llama" else _byte_level(facts, pre)
    backend.add_special_tokens(_added(facts, lambda kind: kind in (_UNKNOWN, _CONTROL), special=True))
    backend.add_tokens(_added(facts, lambda kind: kind == _USER_DEFINED, special=False))
    if facts.add_bos and facts.bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single="BOS $A", special_tokens=[("BOS", facts.bos)]
        )
    return backend


def _byte_level(facts: GgufTokenizer, pre: _Pre) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_model(facts, pre))
    backend.normalizer = normalizers.NFC() if pre.nfc else None
    cuts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(cut), "isolated") for cut in pre.cuts
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _check(facts: GgufTokenizer) -> None:
    n_tokens = len(facts.tokens)
    if not 0 < n_tokens <= VOCAB_MAX or len(facts.merges) > MERGES_MAX:
        raise RejectedError(
            f"the GGUF has {n_tokens} tokens and {len(facts.merges)} merges, "
            f"allowed are 1 to {VOCAB_MAX} and at most {MERGES_MAX}",
            param="model",
        )
    if len(facts.token_types) != n_tokens:
        raise RejectedError(
            f"the GGUF has {n_tokens} tokens but {len(facts.token_types)} token types", param="model"
        )
    if len(set(facts.tokens)) != n_tokens:
        raise RejectedError("the GGUF lists a token twice, so its id is not known", param="model")
    for name, id in (("bos", facts.bos), ("eos", facts.eos), ("unknown", facts.unk)):
        if id is not None and not 0 <= id < n_tokens:
            raise RejectedError(f"the GGUF's {name} token id {id} is not below {n_tokens}", param="model")


def _model(facts: GgufTokenizer, pre: _Pre) -> models.BPE:
    merges = [_merge(line) for line in facts.merges]
    vocab = {token: id for id, token in enumerate(facts.tokens)}
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    except Exception as e:  # `tokenizers` raises plain Exception (a merge whose parts are no tokens)
        raise RejectedError(f"the GGUF's merges do not fit its tokens: {e}", param="model") from e


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right or " " in right:
        raise RejectedError(f"the GGUF's merge {line!r} is not two tokens", param="model")
    return left, right


def _added(facts: GgufTokenizer, wanted: Callable[[int], bool], *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, kind in zip(facts.tokens, facts.token_types, strict=True)
        if wanted(kind) and token
    ]
