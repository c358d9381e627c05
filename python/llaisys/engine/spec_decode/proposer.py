"""Proposer: the interface of everything that drafts tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from llaisys.engine.request import Request


class Proposer(Protocol):
    """Proposes the next tokens of decoding requests. Called once per step for all of them."""

    @property
    def seconds_per_draft(self) -> float:
        """Seconds that one more draft of all requests takes to propose; 0 if it hardly takes any."""
        ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        """Return up to `budgets[i]` draft tokens for each request, which continue its `token_ids`."""
        ...

    def finish(self, request: Request) -> None:
        """Drop the state of a request that has ended; no effect for an unknown one."""
        ...

    def close(self) -> None:
        """Free what the proposer holds; idempotent."""
        ...


class HostProposer(ABC):
    """A proposer that computes on the host: its drafts take microseconds, and it holds no resources."""

    seconds_per_draft = 0.0

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        """Return the drafts of each request; see `Proposer`."""
        return [self._drafts(*each) for each in zip(requests, budgets, strict=True)]

    def close(self) -> None:  # noqa: B027 -- nothing to free is the usual case
        """Do nothing."""

    @abstractmethod
    def _drafts(self, request: Request, budget: int) -> list[int]:
        """Return up to `budget` drafts of one request."""
