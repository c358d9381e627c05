"""Tokenizer: converts between text and token ids, with the `tokenizers` package.

Invariant: a `Tokenizer` does not change after construction, so threads share it without a lock.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import normalizers, processors

from llaisys.errors import ContextLengthError, RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo
from llaisys.text.charsmap import check_normalizer
from llaisys.text.gguf import build_gguf
from llaisys.text.gguf_encoder import build_gguf_encoder
from llaisys.text.model_files import read_object, special_strings

# The core has validated tokenizer.json (`_core.inspect`): size, nesting, counts, patterns and growth. The
# cost of a pattern is bounded by Oniguruma's retry limit (ten million); `encode` rejects a text that exceeds
# it.
FILE_BYTES_MAX = 64 << 20
VOCAB_MAX = 1 << 20


def _byte_alphabet() -> dict[int, int]:
    """Return GPT-2's byte alphabet as a map from code point to byte.

    Printable bytes (`!`..`~`, `¡`..`¬`, `®`..`ÿ`) map to themselves; the other 68 are U+0100 onwards in
    ascending order. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printing)]
    return {byte: byte for byte in printing} | {0x100 + rank: byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
# How SentencePiece writes a space in a token, and the token of a byte.
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# The largest factor by which NFC shortens a text in UTF-8 (Unicode FAQ on normalization).
_NFC_SHRINK_MAX = 3


class PairPrompt(NamedTuple):
    """The token ids of a query and a document. `second_segment`: where the second token type begins."""

    ids: list[int]
    second_segment: int | None = None


class Tokenizer:
    """A BPE tokenizer, byte-level or SentencePiece's: every token is a fixed byte string.

    That of an encoder may be of any kind (WordPiece, Unigram), because it never streams a text.

    SentencePiece adds a space before a text and drops it when decoding. A completion continues a text, so
    `decode` keeps its first space.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, is_encoder: bool = False, tokens: list[str] | None = None
    ) -> None:
        """Take ownership of `backend`. Raises UnsupportedError for another kind of tokenizer.

        `tokens`: its vocabulary by id, which takes 0.2 s to read back from `backend` if there are 150,000.
        """
        self.is_encoder = is_encoder
        self._is_sentencepiece = not is_encoder and _is_sentencepiece(backend)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._tokens = _tokens_by_id(backend) if tokens is None else tokens
        self._bytes_by_id: dict[int, bytes] = {}
        self._bytes_per_token_max = _bytes_per_token_max(backend, self._tokens)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one. Further ids of the model (padded rows) have no text."""
        return len(self._tokens)

    def to_json(self) -> str:
        """Return the tokenizer in the format of `tokenizer.json`, whatever its source."""
        return self._backend.to_str()

    def encode_pair(self, first: str, second: str, n_tokens_max: int | None = None) -> PairPrompt:
        """Return the token ids of two texts with the tokenizer's special tokens between and around them.

        Of more than `n_tokens_max` tokens, the ends of the texts are cut off, the longer one's first. Raises
        RejectedError if a text cannot be encoded or nothing of it would be left.
        """
        ids = [self.encode(text, add_special_tokens=False) for text in (first, second)]
        parts = [self._backend.encode(text, add_special_tokens=False) for text in (first, second)]
        if n_tokens_max is not None:
            n_special = self._backend.num_special_tokens_to_add(is_pair=True)
            left = n_tokens_max - n_special
            if left < 2:
                raise RejectedError(
                    f"truncate_prompt_tokens is {n_tokens_max}, but a pair has {n_special} special tokens: "
                    f"allow at least {n_special + 2}",
                    param="truncate_prompt_tokens",
                )
            n_first = min(len(ids[0]), max(left - len(ids[1]), (left + 1) // 2))
            for part, n in zip(parts, (n_first, left - n_first), strict=True):
                part.truncate(n)
        whole = self._backend.post_process(parts[0], parts[1], True)
        types = list(whole.type_ids)
        n_first = types.count(0)
        if types != [0] * n_first + [1] * (len(types) - n_first):
            raise UnsupportedError("the tokenizer's token types are not 0, then 1", param="model")
        return PairPrompt(list(whole.ids), n_first if n_first < len(types) else None)

    def truncate(self, ids: Sequence[int], n_tokens: int, side: str) -> list[int]:
        """Return `n_tokens` tokens at most of a text, with special tokens. `ids`: its tokens without them.

        `side`: the side from which tokens are cut off. Raises RejectedError if nothing would be left.
        """
        before, after = self._special_ends
        n_left = n_tokens - len(before) - len(after)
        if n_left < 1:
            raise RejectedError(
                f"truncate_prompt_tokens is {n_tokens}, but a text has {len(before) + len(after)} special "
                "tokens: allow more",
                param="truncate_prompt_tokens",
            )
        return [*before, *(ids[:n_left] if side == "right" else ids[-n_left:]), *after]

    @functools.cached_property
    def _special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        bare = self.encode("a", add_special_tokens=False)
        whole = self.encode("a", add_special_tokens=True)
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def encode(self, text: str, add_special_tokens: bool, n_tokens_max: int | None = None) -> list[int]:
        """Return the token ids of a text. `add_special_tokens` adds the model's own (bos, if any).

        Special tokens written in the text become their ids, as in transformers. The GIL is released.
        `n_tokens_max` rejects, before tokenizing, a text whose length in bytes implies more tokens; it is not
        an exact limit. Raises RejectedError if the text cannot be encoded, ContextLengthError if it is too
        long.
        """
        try:
            n_bytes = len(text.encode("utf-8"))  # `tokenizers` reports a lone surrogate as a wrong type
            self._check_length(n_bytes, n_tokens_max)
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except UnicodeEncodeError as e:
            raise RejectedError(
                f"the text is not valid Unicode at character {e.start}", param="prompt"
            ) from e
        except (KeyboardInterrupt, SystemExit, ContextLengthError):
            raise
        except BaseException as e:
            # A panic inside `tokenizers` (its regular expressions' retry limit) is not an Exception.
            raise RejectedError(f"the tokenizer cannot encode this text: {e}", param="prompt") from e

    def _check_length(self, n_bytes: int, n_tokens_max: int | None) -> None:
        if (
            n_tokens_max is None
            or self._bytes_per_token_max is None
            or n_bytes <= n_tokens_max * self._bytes_per_token_max
        ):
            return
        raise ContextLengthError(
            f"the prompt has {n_bytes} bytes, which are more than the {n_tokens_max} tokens allowed",
            param="prompt",
        )

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids. Invalid UTF-8 becomes U+FFFD; an id without a token adds nothing."""
        if self.is_encoder:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        skipped = self._special if skip_special_tokens else frozenset[int]()
        return b"".join(self.id_to_bytes(id) for id in ids if id not in skipped).decode("utf-8", "replace")

    def warm_up(self) -> None:
        """Use the tokenizer once, so that no request waits for the state that its first use builds."""
        self.decode(self.encode("Hello, world", add_special_tokens=True), True)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of control tokens."""
        return self._special

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry; None if there is none."""
        id: int | None = self._backend.token_to_id(token)
        return id

    def vocab(self) -> dict[str, int]:
        """Return a copy of the vocabulary, entry -> id."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def is_special(self, id: int) -> bool:
        """Return True for control tokens such as `<|im_end|>`, which `skip_special_tokens` leaves out."""
        return id in self._special

    def is_added(self, id: int) -> bool:
        """Return True for tokens that are matched in a text before it is divided into others."""
        return id in self._added

    def id_to_bytes(self, id: int) -> bytes:
        """Return the bytes of one token; empty if there is no such token."""
        known = self._bytes_by_id.get(id)
        if known is None:
            known = self._token_bytes(id)
            if known:  # so that the vocabulary bounds the cache
                self._bytes_by_id[id] = known
        return known

    def _token_bytes(self, id: int) -> bytes:
        token = self._tokens[id] if 0 <= id < len(self._tokens) else ""
        if self._is_sentencepiece:
            byte = None if id in self._added else _BYTE_TOKEN.fullmatch(token)
            return token.replace(_SPACE, " ").encode("utf-8") if byte is None else bytes.fromhex(byte[1])
        if id in self._added:
            return token.encode("utf-8")
        try:
            return bytes(_BYTE_OF_CHARACTER[ord(character)] for character in token)
        except KeyError:
            return token.encode("utf-8")

    def vocab_text(self, id: int) -> str:
        """Return one token as the vocabulary writes it (`\u0120the`); empty if there is no such token."""
        return self._tokens[id] if 0 <= id < len(self._tokens) else ""

    def token_text(self, id: int) -> str:
        """Return one token as text, for logprobs. A partial character becomes U+FFFD."""
        return self.id_to_bytes(id).decode("utf-8", "replace")


def tokenizer_of_json(text: str, *, is_encoder: bool = False) -> Tokenizer:
    """Return the tokenizer that `to_json` wrote."""
    return Tokenizer(tokenizers.Tokenizer.from_str(text), is_encoder=is_encoder)


def load_tokenizer(info: ModelInfo) -> Tokenizer:
    """Return the tokenizer of a checkpoint, from the GGUF or from `tokenizer.json` in its folder.

    Raises RejectedError (missing, damaged, too large) or UnsupportedError naming another kind.
    """
    if info.tokenizer is not None and info.is_encoder:
        return Tokenizer(build_gguf_encoder(info.tokenizer), is_encoder=True)
    if info.tokenizer is not None:
        return Tokenizer(build_gguf(info.tokenizer), tokens=info.tokenizer.tokens)
    return Tokenizer(_read_folder(Path(info.path)), is_encoder=info.is_encoder)


def _read_folder(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise RejectedError(
            f"{folder} has no tokenizer.json, the only supported tokenizer file", param="model"
        )
    n_bytes = path.stat().st_size
    if n_bytes > FILE_BYTES_MAX:
        raise RejectedError(
            f"tokenizer.json has {n_bytes} bytes, at most {FILE_BYTES_MAX} are read", param="model"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # `tokenizers` raises plain Exception for every error in the file
        raise RejectedError(f"tokenizer.json cannot be read: {e}", param="model") from e
    check_normalizer(backend)
    _add_config_tokens(backend, read_object(folder / "tokenizer_config.json"))
    _add_bos(backend, folder)
    return backend


def _add_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that only `tokenizer_config.json` lists; each must get the id stated there."""
    for id, content, special in _listed_tokens(config.get("added_tokens_decoder")):
        if backend.token_to_id(content) is None:
            backend.add_tokens([tokenizers.AddedToken(content, special=special, normalized=False)])
        own_id = backend.token_to_id(content)
        if own_id != id:
            raise RejectedError(
                f"tokenizer_config.json gives {content!r} the id {id}, tokenizer.json {own_id}",
                param="model",
            )


def _listed_tokens(listed: object) -> list[tuple[int, str, bool]]:
    """Return (id, text, is_special) of each listed token, by id. Raises RejectedError."""
    if not isinstance(listed, dict):
        return []
    tokens = []
    for id, entry in listed.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not (id.isdecimal() and len(id) <= 9 and isinstance(content, str) and content):
            raise RejectedError(
                f"tokenizer_config.json: added_tokens_decoder has {id[:40]!r}, expected ids with content",
                param="model",
            )
        tokens.append((int(id), content, bool(entry.get("special"))))
    return sorted(tokens)


def _add_bos(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Honor `add_bos_token: true` in `tokenizer_config.json` even where tokenizer.json does not add it."""
    bos = special_strings(folder).get("bos_token")
    if read_object(folder / "tokenizer_config.json").get("add_bos_token") is not True or bos is None:
        return
    bos_id = backend.token_to_id(bos)
    if bos_id is None:
        raise RejectedError(f"add_bos_token is set, but {bos!r} is not in the vocabulary", param="model")
    if backend.encode("", add_special_tokens=True).ids[:1] != [bos_id]:
        backend.post_processor = processors.TemplateProcessing(
            single="BOS $A", special_tokens=[("BOS", bos_id)]
        )


def _is_sentencepiece(backend: tokenizers.Tokenizer) -> bool:
    """Return True for a SentencePiece tokenizer, False for a byte-level one.

    Raises UnsupportedError for any other.
    """
    decoder = backend.decoder
    state: dict[str, Any] = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return False
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else []
    replace = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    bare = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps in (bare, [*bare, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]):
        return True
    names = ", ".join(str(step["type"]) for step in steps)
    kind = f"{state['type']} of {names}" if names else state["type"]
    raise UnsupportedError(
        f"the tokenizer's decoder is {kind}; supported are ByteLevel and SentencePiece's (Replace, "
        "ByteFallback, Fuse, Strip)",
        param="model",
    )


def _bytes_per_token_max(backend: tokenizers.Tokenizer, tokens: list[str]) -> int | None:
    """Return the most bytes of text that one token represents; None if encoding may drop parts of a text."""
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    composes = backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC)
    if strips or not composes or not _keeps_all_text(backend.pre_tokenizer):
        return None
    # The byte alphabet writes a byte as one or two bytes, so this is an upper bound.
    return _NFC_SHRINK_MAX * max(len(token.encode("utf-8", "surrogatepass")) for token in tokens)


def _keeps_all_text(pre_tokenizer: Any) -> bool:
    """Return True for a pre-tokenizer that splits a text and removes nothing."""
    if pre_tokenizer is None:
        return True
    state: dict[str, Any] = json.loads(pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return all(
        step["type"] in ("ByteLevel", "Digits", "Split") and step.get("behavior") != "Removed"
        for step in steps
    )


def _tokens_by_id(backend: tokenizers.Tokenizer) -> list[str]:
    """Return token strings by id (in the byte alphabet, except added tokens); unused ids are empty."""
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= VOCAB_MAX:
        raise RejectedError(
            f"the tokenizer's ids end at {size - 1}, allowed are 0 to {VOCAB_MAX - 1}", param="model"
        )
    tokens = [""] * size
    for token, id in vocab.items():
        tokens[id] = token
    return tokens
