"""The prompt tokens of one step, divided among requests and clients. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llaisys.engine.limits import Limits
from llaisys.engine.request import Request
from llaisys.engine.step_speed import StepSpeed

# How many times the limit a step may take in which no request decodes. Small chunks of a prompt read the
# weights more often (each reads nearly all experts), but the next request waits until the step ends.
_STEP_TIMES_ALONE = 4


class PrefillBudget:
    """The prompt tokens left in one step: in total, per request and per client."""

    def __init__(
        self, limits: Limits, speed: StepSpeed, decoding: Sequence[Request], n_clients: int = 1
    ) -> None:
        """`n_clients`: clients with shares that have prompts to compute."""
        most = limits.max_num_batched_tokens - len(decoding)
        limit_s = limits.max_step_time_s * (1 if decoding else _STEP_TIMES_ALONE)
        self.left = speed.prefill_tokens(limit_s, most)
        self.per_request = limits.long_prefill_token_threshold or self.left
        # While other prompts need tokens, none gets more than half.
        self.fair_share = min(self.per_request, -(-self.left // 2))
        self._per_client = limits.max_client_tokens_per_step
        # Each of several clients gets an equal part until all have been served.
        self._client_share = self.left if n_clients < 2 else -(-self.left // n_clients)
        self._of_client: Counter[str] = Counter()
        counted = decoding if self._per_client is not None else ()
        self._decoding = Counter(request.source.client_id for request in counted)

    def grant(self, request: Request, n_wanted: int, n_had: int, *, all_served: bool) -> int:
        """Grant up to `n_wanted` tokens to a request that has `n_had` in this step; return the number
        granted.

        `all_served`: every other prompt has its part.
        """
        most = self.per_request if all_served else self.fair_share
        client_left = self.left_of_client(request, all_served=all_served)
        granted = max(0, min(n_wanted, self.left, most - n_had, client_left))
        self.left -= granted
        self._of_client[request.source.client_id] += granted
        return granted

    def left_of_client(self, request: Request, *, all_served: bool = False) -> int:
        """Return the number of tokens that the request's client may still get."""
        client = request.source.client_id
        n_had = self._of_client[client]
        left = self.left if all_served else self._client_share - n_had
        if self._per_client is None:
            return left
        return min(left, self._per_client - n_had - self._decoding[client])
