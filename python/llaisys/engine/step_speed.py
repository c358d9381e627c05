"""StepSpeed: the measured speed of steps, which bounds the prompt tokens of the next one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the newest observation in a moving average.
_NEWEST_WEIGHT = 0.2
# Minimum prompt tokens of a step, however slow the machine is, so that every prompt makes progress.
PREFILL_TOKENS_MIN = 16


def moving_average(old: float | None, new: float) -> float:
    """Return an exponential moving average after the observation `new`; `old` is None before the first."""
    return new if old is None else old + _NEWEST_WEIGHT * (new - old)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step without prompt tokens: its rows, drafts included, and its seconds."""

    n_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """Measured seconds of a step without prompt tokens, and the additional seconds per prompt token.

    None before the first observation. Moving averages, so that a single slow step does not stop prompts. The
    seconds per prompt token are weighted by tokens: a step that computes the last token of a cached prompt
    says little about the time of a long one.
    """

    step_s: float | None = None
    prefill_token_s: float | None = None
    # Moving average of the prompt tokens of steps that have some: the weight of `prefill_token_s`.
    prefill_tokens_per_step: float = 1.0

    def observe(self, seconds: float, n_prefill: int) -> StepSpeed:
        """Return the speed after a step that took `seconds` and computed `n_prefill` prompt tokens."""
        if n_prefill == 0:
            step_s = moving_average(self.step_s, seconds)
            return StepSpeed(step_s, self.prefill_token_s, self.prefill_tokens_per_step)
        added_s = max(0.0, seconds - (self.step_s or 0.0))
        if self.prefill_token_s is None:
            return StepSpeed(self.step_s, added_s / n_prefill, n_prefill)
        n_tokens = moving_average(self.prefill_tokens_per_step, n_prefill)
        added_s = moving_average(self.prefill_token_s * self.prefill_tokens_per_step, added_s)
        return StepSpeed(self.step_s, added_s / n_tokens, n_tokens)

    def longest_s(self, n_prefill: int) -> float:
        """Return the predicted seconds of a step with `n_prefill` prompt tokens; 0 before an observation."""
        return (self.step_s or 0.0) + (self.prefill_token_s or 0.0) * n_prefill

    def prefill_tokens(self, limit_s: float, most: int) -> int:
        """Return the number of prompt tokens, up to `most`, that fit in a step of `limit_s` seconds."""
        left_s = limit_s - (self.step_s or 0.0)
        if self.prefill_token_s is None or self.prefill_token_s * most <= left_s:
            return most  # also avoids a division by a tiny number
        n_tokens = int(left_s / self.prefill_token_s) if left_s > 0 else 0
        return min(most, max(PREFILL_TOKENS_MIN, n_tokens))
