"""A clock that a test advances."""

from __future__ import annotations


class FakeClock:
    """A clock of monotonic seconds; call it for the time."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        """Advance the time by `by_s` seconds."""
        self.now_s += by_s
