"""The `usage` object: tokens of all prompts and answers of one HTTP request."""

from __future__ import annotations

from typing import Any

from llaisys.types import RequestOutput


class Usage:
    """Adds up deltas, by the index of their prompt. Tokens of a shared prefix count as prompt tokens and as
    `cached_tokens`."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0

    def prompt(self, index: int, n_tokens: int) -> None:
        """States the length of a prompt before its first delta."""
        self._prompt_tokens[index] = n_tokens

    def add(self, index: int, delta: RequestOutput) -> None:
        """Counts one delta."""
        self._prompt_tokens[index] = len(delta.prompt_token_ids)
        # The first delta of a prompt has it.
        self._cached_tokens[index] = self._cached_tokens.get(index, 0) or delta.num_cached_tokens
        self.completion_tokens += sum(len(answer.token_ids) for answer in delta.outputs)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self._prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        """Of the prompt tokens those that were not computed anew."""
        return sum(self._cached_tokens.values())

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
