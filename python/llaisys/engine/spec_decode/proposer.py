"""Proposer: the interface of everything that drafts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llaisys.engine.request import Request


class Proposer(Protocol):
    """Proposes the next tokens of decoding requests. Called once per step for all of them."""

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        """Return up to `budgets[i]` draft tokens for each request, which continue its `token_ids`."""
        ...

    def finish(self, request: Request) -> None:
        """Drop the state of a request that has ended; no effect for an unknown one."""
        ...
