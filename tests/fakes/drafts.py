"""A speculator for tests, whose drafts are right, wrong or random whatever they cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from llaisys.engine.request import Request
from llaisys.engine.step_speed import DecodeStep

N_DRAFTS_MAX = 16


class ScriptedSpeculator:
    """Proposes up to 16 drafts for each decoding request, in every step.

    `next_tokens(request, n)`: the next `n` tokens of a request, or fewer. By ordinal, the drafts of a request
    are all right, all wrong, or each of them is right with a probability of 0.8.
    """

    def __init__(
        self, seed: int, vocab_size: int, next_tokens: Callable[[Request, int], Sequence[int]]
    ) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._next_tokens = next_tokens
        self.n_accepted = self.n_rejected = 0

    def propose(
        self,
        running: Sequence[Request],
        n_slots: int,  # noqa: ARG002 -- as the real speculator's
        last_step: DecodeStep | None,  # noqa: ARG002 -- as above
    ) -> dict[int, list[int]]:
        """Return the drafts of running requests by ordinal."""
        drafts = {}
        for request in running:
            n = min(self._rng.randint(0, N_DRAFTS_MAX), request.token_limit - len(request.token_ids) - 1)
            if request.num_missing == 1 and request.num_output and n > 0:
                p_right = (1.0, 0.0, 0.8)[request.ordinal % 3]
                right = [*self._next_tokens(request, n)]
                right += [-1] * (n - len(right))
                drafts[request.ordinal] = [self._draft(token, p_right) for token in right]
        return drafts

    def record_accepted(self, request: Request, n_drafts: int, n_accepted: int) -> None:  # noqa: ARG002 -- as above
        """Count accepted and rejected drafts."""
        self.n_accepted += n_accepted
        self.n_rejected += n_drafts - n_accepted

    def finish(self, request: Request) -> None:
        """Do nothing: the requests hold no state."""

    def close(self) -> None:
        """Do nothing."""

    def totals(self) -> dict[str, Any]:
        """Return no totals."""
        return {}

    def _draft(self, right: int, p_right: float) -> int:
        if right >= 0 and self._rng.random() < p_right:
            return right
        wrong = self._rng.randrange(self._vocab_size - 1)
        return wrong + (wrong >= right >= 0)
