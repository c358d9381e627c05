"""The model of the fake core: the next token, logprobs and hidden states are hashes of the tokens so far."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llaisys.errors import RejectedError

VOCAB_SIZE = 300
# Tokens that cause faults, by what happens to the step or the row that computes them.
NON_FINITE, REFUSED, DEADLY, PANICS = 296, 297, 298, 299
N_PLAIN = 256  # sampled ids are below it
D_MODEL = 3  # of the hidden states; `inspect` reports 1, which sizes the memory


@dataclass(frozen=True)
class SamplerSpec:
    """The sampling parameters of a sequence. The fake uses only some of them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    allowed_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    min_tokens: int = 0
    stop_ids: list[int] = field(default_factory=list)
    seed: int = 0
    choice: int = 0
    top_logprobs: int = -1
    logprob_ids: list[int] = field(default_factory=list)
    prompt_logprobs: int = -1

    def __post_init__(self) -> None:
        for token, _ in self.logit_bias:
            if token == REFUSED:
                raise RejectedError(f"logit_bias holds token {token}", param="logit_bias")


def next_token(
    tokens: Iterable[int], spec: SamplerSpec | None, n_output: int, mask: NDArray[np.uint32] | None = None
) -> int:
    """Return the next token: a hash of the tokens so far, and of the seed if the temperature is not 0.

    With a mask it is one of the allowed tokens.
    """
    spec = spec or SamplerSpec(temperature=0.0)
    for token, bias in spec.logit_bias:
        if bias == 100.0:
            return token
    draw = (spec.seed + 7919 * spec.choice) % 2**31 if spec.temperature > 0 else 0
    state = np.array([*tokens, draw], np.int32).tobytes()
    if mask is not None:
        assert mask.shape == (-(-VOCAB_SIZE // 32),)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[zlib.crc32(state) % len(allowed)])
    while True:
        token = zlib.crc32(state) % N_PLAIN
        if n_output >= spec.min_tokens or token not in spec.stop_ids:
            return token
        state += b"again"


def answer(prompt: list[int], n_tokens: int, spec: SamplerSpec | None = None, window: int = 0) -> list[int]:
    """Return the completion of `n_tokens` tokens. The model sees the last `window` tokens; 0: all."""
    tokens = list(prompt)
    for i in range(n_tokens):
        tokens.append(next_token(tokens[-window:], spec, i))
    return tokens[len(prompt) :]


def prompt_logprob(tokens: Iterable[int], token: int) -> float:
    """Return the logprob of a prompt token that follows `tokens`: a hash of all of them."""
    return -zlib.crc32(np.array([*tokens, token], np.int32).tobytes()) / 2**32


def hidden_of(tokens: Iterable[int]) -> list[float]:
    """Return the final hidden state `[D_MODEL]` of the last token: hashes of several magnitudes, or NaN."""
    seen = [*tokens]
    if NON_FINITE in seen:
        return [float("nan")] * D_MODEL
    state = np.array(seen, np.int32).tobytes()
    return [zlib.crc32(state + bytes([i])) / 2.0 ** (31 - 9 * i) for i in range(D_MODEL)]
