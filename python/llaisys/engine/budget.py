"""How many tokens a step computes, and who of those who run sits in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.engine.limits import Limits
from llaisys.engine.request import Request

# Weight of the newest observation in the running means of `StepSpeed`.
_NEWEST = 0.2
# However slow the machine is, a step computes so many prompt tokens if there are any: prompts do end.
PREFILL_TOKENS_MIN = 16


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """Measured: seconds of a step without prompt tokens, and seconds that each prompt token adds.

    None before the first observation. Running means: a single slow step does not stop prompts.
    """

    step_s: float | None = None
    prefill_token_s: float | None = None

    def observe(self, seconds: float, n_prefill: int) -> StepSpeed:
        """The speed after a step that took `seconds` and computed `n_prefill` prompt tokens."""
        if n_prefill == 0:
            return StepSpeed(_mean(self.step_s, seconds), self.prefill_token_s)
        each = max(0.0, seconds - (self.step_s or 0.0)) / n_prefill
        return StepSpeed(self.step_s, _mean(self.prefill_token_s, each))

    def longest_s(self, n_prefill: int) -> float:
        """Seconds of a step with so many prompt tokens; 0 before the first observation."""
        return (self.step_s or 0.0) + (self.prefill_token_s or 0.0) * n_prefill

    def prefill_tokens(self, limit_s: float, most: int) -> int:
        """Prompt tokens, at most `most`, that a step of `limit_s` seconds has time for."""
        left_s = limit_s - (self.step_s or 0.0)
        if self.prefill_token_s is None or self.prefill_token_s * most <= left_s:
            return most  # before a division by next to nothing
        n_tokens = int(left_s / self.prefill_token_s) if left_s > 0 else 0
        return min(most, max(PREFILL_TOKENS_MIN, n_tokens))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST * (new - old)


def sit(running: Sequence[Request], n_seats: int) -> list[Request]:
    """Who takes part in a step: everybody, or the `n_seats` least recently served. In queue order."""
    if len(running) <= n_seats:
        return list(running)
    chosen = sorted(running, key=lambda r: r.last_step)[:n_seats]
    by_ordinal = {r.ordinal for r in chosen}
    return [r for r in running if r.ordinal in by_ordinal]


class PrefillBudget:
    """Prompt tokens that are left in one step: in all, for each request, and for each client."""

    def __init__(
        self, limits: Limits, speed: StepSpeed, decoding: Sequence[Request], n_clients: int = 1
    ) -> None:
        """`n_clients`: clients with shares that have prompts to compute."""
        room = limits.max_num_batched_tokens - len(decoding)
        self.left = speed.prefill_tokens(limits.max_step_time_s, room)
        self.per_request = limits.long_prefill_token_threshold or self.left
        # Where others want tokens too, no prompt takes more than half before they had theirs.
        self.fair_share = min(self.per_request, -(-self.left // 2))
        self._per_client = limits.max_client_tokens_per_step
        # An equal part for each of several clients, until each has had the chance to use its own.
        self._client_share = self.left if n_clients < 2 else -(-self.left // n_clients)
        self._of_client: dict[str, int] = {}
        self._decoding: dict[str, int] = {}
        for request in decoding if self._per_client is not None else ():
            client = request.source.client_id
            self._decoding[client] = self._decoding.get(client, 0) + 1

    def grant(self, request: Request, n_wanted: int, n_had: int, *, alone: bool) -> int:
        """Takes as many of `n_wanted` tokens as are left for this request, which had `n_had` in this step."""
        most = self.per_request if alone else self.fair_share
        granted = max(0, min(n_wanted, self.left, most - n_had, self.left_of_client(request, alone=alone)))
        client = request.source.client_id
        self.left -= granted
        self._of_client[client] = self._of_client.get(client, 0) + granted
        return granted

    def left_of_client(self, request: Request, *, alone: bool = False) -> int:
        """What the request's client may still have; with `alone`, when the others have had their part."""
        client = request.source.client_id
        n_had = self._of_client.get(client, 0)
        left = self.left if alone else self._client_share - n_had
        if self._per_client is None:
            return left
        return min(left, self._per_client - n_had - self._decoding.get(client, 0))
