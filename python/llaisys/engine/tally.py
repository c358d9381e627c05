"""What an engine counts. Totals since its start; the newest step's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llaisys.engine.budget import StepSpeed
from llaisys.stats import CANCEL_BOUNDS_S, STEP_BOUNDS_S, STEP_TOKENS_BOUNDS, Histogram
from llaisys.types import FinishReason

# What a step's time goes to: whom it serves and where, the model, whose tokens the result is; and what the
# engine thread does until the next step, which is mostly telling it.
PHASES = ("plan", "execute", "settle", "deliver")


@dataclass(slots=True)
class Tally:
    """Owned by one engine. `num_steps` counts the plans that were carried out. `clock`: seconds; it times the
    phases, and nothing is decided by it."""

    clock: Callable[[], float]
    num_steps: int = 0
    num_preempted: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_evicted_cells: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_s: float = 0.0
    speed: StepSpeed = field(default_factory=StepSpeed)
    finished: Counter[str] = field(default_factory=Counter)
    tokens_of_steps: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS_BOUNDS))
    seconds_of_phases: dict[str, Histogram] = field(
        default_factory=lambda: {phase: Histogram(STEP_BOUNDS_S) for phase in PHASES}
    )
    seconds_of_cancels: Histogram = field(default_factory=lambda: Histogram(CANCEL_BOUNDS_S))
    num_violations: int = 0
    _began_s: float | None = None
    _lap_s: float = 0.0

    def begin(self, now_s: float) -> None:
        """A step begins. If the last one computed something and work went on, it took until now."""
        if self._began_s is not None and (self.step_prefill_tokens or self.step_decode_tokens):
            self.step_s = now_s - self._began_s
            self.lap("deliver")
            self.speed = self.speed.observe(self.step_s, self.step_prefill_tokens)
        self._began_s, self._lap_s = now_s, self.clock()
        self.step_prefill_tokens = self.step_decode_tokens = 0
        self.num_steps += 1

    def lap(self, phase: str) -> None:
        """The time since the last lap, or since the step began, was this phase's."""
        now_s = self.clock()
        self.seconds_of_phases[phase].observe(now_s - self._lap_s)
        self._lap_s = now_s

    def computed(self, n_prefill: int, n_decode: int) -> None:
        """A batch was run, with so many tokens of prompts and of answers."""
        self.step_prefill_tokens, self.step_decode_tokens = n_prefill, n_decode
        self.tokens_of_steps.observe(n_prefill + n_decode)

    def pause(self) -> None:
        """Nothing is open: the time until the next step is not a step's."""
        self._began_s = None

    def admitted(self, n_prompt: int, n_cached: int) -> None:
        """A request was admitted for the first time, with so much of its prompt cached."""
        self.prefix_query_tokens += n_prompt
        self.prefix_hit_tokens += n_cached

    def cancelled(self, seconds: float) -> None:
        """What a client cancelled holds nothing any more, so long after it was asked for."""
        self.seconds_of_cancels.observe(seconds)

    def figures(self) -> dict[str, Any]:
        """The totals as fields of EngineStats."""
        return {
            "num_steps": self.num_steps,
            "num_preempted": self.num_preempted,
            "num_evicted_cells": self.num_evicted_cells,
            "num_violations": self.num_violations,
            "prefix_query_tokens": self.prefix_query_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "step_prefill_tokens": self.step_prefill_tokens,
            "step_decode_tokens": self.step_decode_tokens,
            "step_s": self.step_s,
            "tokens_of_steps": self.tokens_of_steps.data(),
            "seconds_of_phases": {name: each.data() for name, each in self.seconds_of_phases.items()},
            "seconds_of_cancels": self.seconds_of_cancels.data(),
            "finished": dict(self.finished),
        }

    def ended(self, reason: FinishReason) -> None:
        """A choice ended."""
        self.finished[reason.value] += 1
