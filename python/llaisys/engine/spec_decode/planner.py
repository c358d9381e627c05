"""DraftPlanner: chooses how many drafts a step verifies, so that tokens per second rise. Pure.

A step of `n` rows takes the seconds of the cost curve and gives one token per request plus the accepted
drafts. Drafts are added by expected gain while the expected tokens per second rise.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.engine.prefix_tree import n_common

# Rows of the largest step with drafts; beyond it, arithmetic binds and drafts do not pay.
ROWS_MAX = 16
# Weight of the newest observation of a row count, and its influence on the other row counts.
_NEWEST_WEIGHT, _DRIFT_WEIGHT = 0.1, 0.02
# Observations after which the monotone curve is computed, also if nothing reads it.
_UNREAD_MAX = 16
# An observation counts as at most this multiple of the expected seconds, because a step may wait for the CPU.
_OUTLIER = 4.0
# The expected rate with drafts must exceed the rate without by this factor, to cover errors of the estimates.
_MARGIN = 1.03
# Weight of the newest outcome in the acceptance of a request and in that of all requests.
_OUTCOME_WEIGHT, _SHARED_OUTCOME_WEIGHT = 0.15, 0.02


class CostCurve:
    """Seconds of a decode step by its number of rows, 1 to ROWS_MAX."""

    def __init__(self, measured: dict[int, float]) -> None:
        """`measured`: seconds of some numbers of rows, at least of one; the others are interpolated."""
        known = sorted(measured.items())
        # Seconds of a step are `_scale` times these. A step is observed far more often than a plan reads the
        # curve, so the scale moves all of it at once, and `_monotone` follows later.
        self._unscaled = [_interpolated(known, n) for n in range(1, ROWS_MAX + 1)]
        self._scale = 1.0
        self._monotone, self._n_unread = monotone(self._unscaled), 0

    def observe(self, n_rows: int, seconds: float) -> None:
        """Record a step. The others follow slowly, since the machine and the contexts change for all."""
        if not 1 <= n_rows <= ROWS_MAX or seconds <= 0:
            return
        expected = self._monotone[n_rows - 1] * self._scale
        ratio = min(seconds / expected, _OUTLIER)
        self._scale *= 1 + _DRIFT_WEIGHT * (ratio - 1)
        observed = ratio * expected / self._scale
        self._unscaled[n_rows - 1] += _NEWEST_WEIGHT * (observed - self._unscaled[n_rows - 1])
        self._n_unread += 1
        if self._n_unread >= _UNREAD_MAX:
            self._read()

    def seconds(self, n_rows: int) -> float:
        """Return the expected seconds of a step with 1 to ROWS_MAX rows; never less than with fewer rows."""
        if self._n_unread:
            self._read()
        return self._monotone[n_rows - 1] * self._scale

    def _read(self) -> None:
        self._monotone, self._n_unread = monotone(self._unscaled), 0


def _interpolated(known: Sequence[tuple[int, float]], n: int) -> float:
    """Interpolate linearly between measured points, and extrapolate with the slope of the last two."""
    if len(known) == 1:
        return known[0][1]
    i = min(max(sum(at < n for at, _ in known), 1), len(known) - 1)
    (a, seconds_a), (b, seconds_b) = known[i - 1], known[i]
    return max(seconds_a + (seconds_b - seconds_a) * (n - a) / (b - a), 1e-9)


def monotone(values: Sequence[float]) -> list[float]:
    """Return the closest sequence that never falls, by least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, n = value, 1
        while blocks and blocks[-1][0] > mean:
            last, n_last = blocks.pop()
            mean = (mean * n + last * n_last) / (n + n_last)
            n += n_last
        blocks.append((mean, n))
    return [mean for mean, n in blocks for _ in range(n)]


@dataclass(slots=True)
class Acceptance:
    """The estimated acceptance of drafts: of the `first` of a proposal, and of each `later` one whose
    predecessors were accepted."""

    first: float = 0.5
    later: float = 0.8

    def gains(self, n_drafts: int) -> list[float]:
        """Return the probability of each of `n_drafts` drafts that it is accepted."""
        return [self.first * self.later**i for i in range(n_drafts)]

    def observe(self, n_accepted: int, n_compared: int, weight: float) -> None:
        """Record that the first `n_accepted` of `n_compared` drafts agree with the output."""
        if n_compared:
            self.first += weight * ((n_accepted > 0) - self.first)
        for i in range(1, min(n_accepted + 1, n_compared)):
            self.later += weight * ((i < n_accepted) - self.later)


class DraftPlanner:
    """Estimates costs and acceptance, and chooses the drafts of each step."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._shared = Acceptance()
        self._of_request: dict[int, Acceptance] = {}

    def acceptance(self, ordinal: int) -> Acceptance:
        """Return the acceptance of a request; that of all requests for a new one."""
        known = self._of_request.get(ordinal)
        if known is None:
            known = self._of_request[ordinal] = Acceptance(self._shared.first, self._shared.later)
        return known

    def observe_drafts(self, ordinal: int, drafts: Sequence[int], output: Sequence[int]) -> None:
        """Compare proposed drafts, also those that no step verified, with the next tokens of a request."""
        n_compared = min(len(drafts), len(output))
        n_accepted = n_common(array("i", drafts), array("i", output))
        self.acceptance(ordinal).observe(n_accepted, n_compared, _OUTCOME_WEIGHT)
        self._shared.observe(n_accepted, n_compared, _SHARED_OUTCOME_WEIGHT)

    def finish(self, ordinal: int) -> None:
        """Drop the estimate of a request that has ended."""
        self._of_request.pop(ordinal, None)

    def plan(self, n_rows: int, proposed: dict[int, int], seconds_per_draft: float = 0.0) -> dict[int, int]:
        """Return the number of drafts of each request, by ordinal, without those that get none.

        - `n_rows`: decoding requests in the step. `proposed`: the number of proposed drafts by ordinal.
        - `seconds_per_draft`: seconds to propose one more draft for all requests.
        """
        if not proposed or not 1 <= n_rows < ROWS_MAX:
            return {}
        gains = [
            (gain, ordinal) for ordinal, n in proposed.items() for gain in self.acceptance(ordinal).gains(n)
        ]
        gains.sort(key=lambda each: -each[0])
        best_rate, n_best = _MARGIN * n_rows / self.curve.seconds(n_rows), 0
        n_tokens, depths = float(n_rows), dict.fromkeys(proposed, 0)
        for n_drafts, (gain, ordinal) in enumerate(gains[: ROWS_MAX - n_rows], start=1):
            n_tokens += gain
            depths[ordinal] += 1
            seconds = self.curve.seconds(n_rows + n_drafts) + seconds_per_draft * max(depths.values())
            rate = n_tokens / seconds
            if rate > best_rate:
                best_rate, n_best = rate, n_drafts
        planned: dict[int, int] = {}
        for _, ordinal in gains[:n_best]:
            planned[ordinal] = planned.get(ordinal, 0) + 1
        return planned
