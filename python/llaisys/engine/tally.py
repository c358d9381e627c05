"""What an engine counts. Totals since its start; the newest step's own figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from llaisys.engine.budget import StepSpeed
from llaisys.stats import STEP_BOUNDS_S, STEP_TOKENS_BOUNDS, Histogram
from llaisys.types import FinishReason


@dataclass(slots=True)
class Tally:
    """Owned by one engine. `num_steps` counts the plans that were carried out."""

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
    seconds_of_steps: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    _began_s: float | None = None

    def begin(self, now_s: float) -> None:
        """A step begins. If the last one computed something and work went on, it took until now."""
        if self._began_s is not None and (self.step_prefill_tokens or self.step_decode_tokens):
            self.step_s = now_s - self._began_s
            self.seconds_of_steps.observe(self.step_s)
            self.speed = self.speed.observe(self.step_s, self.step_prefill_tokens)
        self._began_s = now_s
        self.step_prefill_tokens = self.step_decode_tokens = 0
        self.num_steps += 1

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

    def ended(self, reason: FinishReason) -> None:
        """A choice ended."""
        self.finished[reason.value] += 1
