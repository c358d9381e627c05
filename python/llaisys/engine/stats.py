"""EngineStatsRecorder: the totals of an engine since its start, and the numbers of its newest step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llaisys.engine.request_queue import WaitingQueue
from llaisys.engine.step_speed import DecodeStep, StepSpeed
from llaisys.outputs import FinishReason
from llaisys.stats import CANCEL_BOUNDS_S, STEP_BOUNDS_S, STEP_TOKENS_BOUNDS, Histogram

# The phases of a step: scheduling, running the model, processing the result, and delivering the outputs. The
# last one includes all work of the engine thread until the next step.
PHASES = ("plan", "execute", "settle", "deliver")


@dataclass(slots=True)
class EngineStatsRecorder:
    """Records the stats of one engine. `num_steps` counts executed steps.

    - `clock` returns seconds and only times the phases.
    - `external_query_tokens`, `external_hit_tokens`: as in `EngineStats`; `DiskCache` counts them.
    - `last_decode`: the previous step, if it computed no prompt tokens.
    """

    clock: Callable[[], float]
    num_steps: int = 0
    num_preempted: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    num_evicted_cells: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_s: float = 0.0
    speed: StepSpeed = field(default_factory=StepSpeed)
    last_decode: DecodeStep | None = None
    finished: Counter[str] = field(default_factory=Counter)
    tokens_of_steps: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS_BOUNDS))
    seconds_of_phases: dict[str, Histogram] = field(
        default_factory=lambda: {phase: Histogram(STEP_BOUNDS_S) for phase in PHASES}
    )
    seconds_of_cancels: Histogram = field(default_factory=lambda: Histogram(CANCEL_BOUNDS_S))
    num_violations: int = 0
    _began_s: float | None = None
    _phase_began_s: float = 0.0

    def begin_step(self, now_s: float) -> None:
        """Begin a step.

        Record the duration of the previous step, if it computed something and work continued.
        """
        self.last_decode = None
        if self._began_s is not None and (self.step_prefill_tokens or self.step_decode_tokens):
            self.step_s = now_s - self._began_s
            self.end_phase("deliver")
            self.speed = self.speed.observe(self.step_s, self.step_prefill_tokens)
            if not self.step_prefill_tokens:
                self.last_decode = DecodeStep(self.step_decode_tokens, self.step_s)
        self._began_s, self._phase_began_s = now_s, self.clock()
        self.step_prefill_tokens = self.step_decode_tokens = 0
        self.num_steps += 1

    def end_phase(self, phase: str) -> None:
        """Record the time since the end of the previous phase, or since the step began, for this phase."""
        now_s = self.clock()
        self.seconds_of_phases[phase].observe(now_s - self._phase_began_s)
        self._phase_began_s = now_s

    def record_batch(self, n_prefill: int, n_decode: int) -> None:
        """Record an executed batch: its numbers of prompt tokens and of decode tokens."""
        self.step_prefill_tokens, self.step_decode_tokens = n_prefill, n_decode
        self.tokens_of_steps.observe(n_prefill + n_decode)

    def pause(self) -> None:
        """Exclude the time until the next step from the durations, because no request is open."""
        self._began_s = None

    def record_admission(self, n_prompt: int, n_cached: int) -> None:
        """Record the first admission of a request with `n_cached` of its `n_prompt` prompt tokens cached."""
        self.prefix_query_tokens += n_prompt
        self.prefix_hit_tokens += n_cached

    def record_cancel(self, seconds: float) -> None:
        """Record the seconds from a cancel until the resources of the request were free."""
        self.seconds_of_cancels.observe(seconds)

    def queued_prefill_s(self, waiting: WaitingQueue) -> float:
        """Return the predicted seconds of all waiting prompts; 0 before a prompt was timed."""
        n_tokens = sum(len(each.token_ids) for queue in waiting.client_queues.values() for each in queue)
        return n_tokens * (self.speed.prefill_token_s or 0.0)

    def totals(self) -> dict[str, Any]:
        """Return the totals as fields of EngineStats."""
        return {
            "num_steps": self.num_steps,
            "num_preempted": self.num_preempted,
            "num_evicted_cells": self.num_evicted_cells,
            "num_violations": self.num_violations,
            "prefix_query_tokens": self.prefix_query_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "external_query_tokens": self.external_query_tokens,
            "external_hit_tokens": self.external_hit_tokens,
            "step_prefill_tokens": self.step_prefill_tokens,
            "step_decode_tokens": self.step_decode_tokens,
            "step_s": self.step_s,
            "tokens_of_steps": self.tokens_of_steps.data(),
            "seconds_of_phases": {name: each.data() for name, each in self.seconds_of_phases.items()},
            "seconds_of_cancels": self.seconds_of_cancels.data(),
            "finished": dict(self.finished),
        }

    def record_finish(self, reason: FinishReason) -> None:
        """Record the end of a choice."""
        self.finished[reason.value] += 1
