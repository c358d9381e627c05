"""Prompts and lengths drawn from a seed, so that two servers receive the same requests.

No tokenizer is needed. A prompt is token ids (exact lengths on /v1/completions) or English words of about one
token each; the token counts of a result come from the server's `usage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Dataset: TypeAlias = Literal["random", "prefix_repetition", "chat"]
Prompt: TypeAlias = "list[int] | str"

# Short words that are one token, with their leading space, in common BPE vocabularies.
WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community name
""".split()  # noqa: SIM905 -- a list of quoted words is harder to read


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the prompt (in a conversation the next user message) and the length of the completion."""

    prompt: Prompt
    output_len: int


Conversation: TypeAlias = "tuple[Turn, ...]"  # one turn, except for the chat workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The parameters of a workload; lengths are in tokens. Defaults are vLLM's.

    - `random`: `prefix_len` shared tokens, then `input_len` tokens per prompt. Lengths are uniform in
      `[len * (1 - range_ratio), len * (1 + range_ratio)]`.
    - `prefix_repetition`: `num_prefixes` prefixes of `prefix_len`, each with `num_prompts / num_prefixes`
      suffixes of `suffix_len`, shuffled.
    - `chat`: conversations of `turns` requests; each user message has `input_len` tokens, and each request
      has all messages before it.
    - `num_prompts` counts requests; for `chat` it is rounded up to whole conversations.
    - `vocab_size`: ids come from its upper 90 percent, because special tokens and bytes are mostly the
      lowest.
    """

    dataset: Dataset = "random"
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    suffix_len: int = 256
    num_prefixes: int = 10
    turns: int = 4
    vocab_size: int = 10_000
    as_text: bool = False

    def draw(self, seed: int) -> list[Conversation]:
        """Return the requests; the same seed gives the same requests."""
        rng = np.random.default_rng(seed)
        if self.dataset == "prefix_repetition":
            return self._prefix_repetition(rng)
        if self.dataset == "chat":
            n_conversations = -(-self.num_prompts // self.turns)
            return [tuple(self._turn(rng, []) for _ in range(self.turns)) for _ in range(n_conversations)]
        shared = self._tokens(rng, self.prefix_len)
        return [(self._turn(rng, shared),) for _ in range(self.num_prompts)]

    def _turn(self, rng: np.random.Generator, shared: list[int]) -> Turn:
        own = self._tokens(rng, self._length(rng, self.input_len))
        return Turn(self._form([*shared, *own]), self._length(rng, self.output_len))

    def _prefix_repetition(self, rng: np.random.Generator) -> list[Conversation]:
        prefixes = [self._tokens(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        conversations: list[Conversation] = []
        for i in range(self.num_prompts):
            prompt = [*prefixes[i % self.num_prefixes], *self._tokens(rng, self.suffix_len)]
            conversations.append((Turn(self._form(prompt), self.output_len),))
        return [conversations[i] for i in rng.permutation(len(conversations))]

    def _length(self, rng: np.random.Generator, mean: int) -> int:
        low, high = int(mean * (1 - self.range_ratio)), -int(-mean * (1 + self.range_ratio) // 1)
        return max(1, int(rng.integers(low, high + 1)))

    def _tokens(self, rng: np.random.Generator, n: int) -> list[int]:
        ids: list[int] = rng.integers(self.vocab_size // 10, self.vocab_size, n).tolist()
        return ids

    def _form(self, ids: list[int]) -> Prompt:
        if self.as_text or self.dataset == "chat":
            return " ".join(WORDS[i % len(WORDS)] for i in ids)
        return ids


def arrival_times(n: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the due times of `n` requests in seconds from the start; all 0 for an infinite rate.

    Gaps are gamma-distributed with shape `burstiness` and mean `1 / rate`: 1 is a Poisson process, below 1
    comes in bursts, above 1 is more regular, infinite is constant. As in vLLM they are scaled so that the
    last request is due at `n / rate`, so the rate is the same for every seed.
    """
    if rate == float("inf"):
        return [0.0] * n
    if burstiness == float("inf"):
        return [(i + 1) / rate for i in range(n)]
    rng = np.random.default_rng([seed, 1])  # a separate stream, so that prompts do not depend on the rate
    due = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), n))
    times: list[float] = (due * (n / rate / due[-1])).tolist()
    return times
