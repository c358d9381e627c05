"""What a service counts: tokens, ends, latencies. No clock: every call brings its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from llaisys.stats import (
    CHOICES_BOUNDS,
    END_TO_END_BOUNDS_S,
    FIRST_TOKEN_BOUNDS_S,
    INTER_TOKEN_BOUNDS_S,
    EngineStats,
    Histogram,
    ServiceStats,
    token_bounds,
)
from llaisys.types import RequestId, RequestOutput, SamplingParams


@dataclass(slots=True)
class _Course:
    """One open request: what was asked, its times in seconds of the caller's clock, and its tokens."""

    n_prompt: int
    params: SamplingParams
    arrival_s: float
    admitted_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    n_cached: int = 0
    n_generated: Counter[int] = field(default_factory=Counter)  # by choice


class Meter:
    """Owns the totals and the courses of the open requests. One thread."""

    def __init__(self, max_model_len: int) -> None:
        """`max_model_len`: tokens of the longest request; bounds of the histograms of tokens."""
        self._courses: dict[RequestId, _Course] = {}
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self._inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self._per_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self._queue = Histogram(END_TO_END_BOUNDS_S)
        self._prefill = Histogram(END_TO_END_BOUNDS_S)
        self._decode = Histogram(END_TO_END_BOUNDS_S)
        self._inference = Histogram(END_TO_END_BOUNDS_S)
        self._end_to_end = Histogram(END_TO_END_BOUNDS_S)
        bounds = token_bounds(max_model_len)
        self._prompt_sizes = Histogram(bounds)
        self._answer_sizes = Histogram(bounds)
        self._longest_choices = Histogram(bounds)
        self._computed = Histogram(bounds)
        self._asked_n = Histogram(CHOICES_BOUNDS)
        self._asked_tokens = Histogram(bounds)

    def submitted(
        self, request_id: RequestId, n_prompt: int, params: SamplingParams, arrival_s: float
    ) -> None:
        """A request was taken."""
        self._courses[request_id] = _Course(n_prompt, params, arrival_s)

    def tokens(self, delta: RequestOutput, now_s: float) -> None:
        """Tokens of one choice arrived together: a delta as OutputProcessor makes it."""
        course = self._courses.get(delta.request_id)
        answer = delta.outputs[0]
        n_tokens = len(answer.token_ids)
        if course is None or n_tokens == 0:
            return
        course.n_cached = max(course.n_cached, delta.num_cached_tokens)
        if course.first_token_s is None:
            self._prompt_tokens += course.n_prompt
            course.first_token_s, course.admitted_s = now_s, course.arrival_s + delta.queued_s
            self._first_token.observe(now_s - course.arrival_s)
            self._queue.observe(delta.queued_s)
            self._prefill.observe(now_s - course.admitted_s)
        else:
            self._inter_token.observe((now_s - course.last_token_s) / n_tokens)
        course.last_token_s = now_s
        course.n_generated[answer.index] += n_tokens
        self._generation_tokens += n_tokens

    def embedded(self, delta: RequestOutput, now_s: float) -> None:
        """Its embedding arrived, which is all of its answer."""
        course = self._courses.get(delta.request_id)
        if course is None:
            return
        self._prompt_tokens += course.n_prompt
        self._queue.observe(delta.queued_s)
        self._prefill.observe(now_s - course.arrival_s - delta.queued_s)

    def finished(self, request_id: RequestId, reason: str, now_s: float) -> None:
        """It ended; a second end, or one of a request that was never taken, is not counted."""
        course = self._courses.pop(request_id, None)
        if course is None:
            return
        self._finished[reason] += 1
        self._end_to_end.observe(now_s - course.arrival_s)
        n_generated = course.n_generated.total()
        self._prompt_sizes.observe(course.n_prompt)
        self._answer_sizes.observe(n_generated)
        self._longest_choices.observe(max(course.n_generated.values(), default=0))
        self._asked_n.observe(course.params.n)
        if course.params.max_tokens is not None:
            self._asked_tokens.observe(course.params.max_tokens)
        if course.first_token_s is not None:
            self._computed.observe(course.n_prompt - course.n_cached)
            decode_s = course.last_token_s - course.first_token_s
            self._decode.observe(decode_s)
            self._inference.observe(course.last_token_s - course.admitted_s)
            if n_generated > 1:
                self._per_token.observe(decode_s / (n_generated - 1))

    def snapshot(self, engine: EngineStats, num_violations: int) -> ServiceStats:
        """Everything now, with the engine's books, and how often those were wrong."""
        return ServiceStats(
            engine=engine,
            invariant_violations=num_violations,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            time_to_first_token_s=self._first_token.data(),
            inter_token_latency_s=self._inter_token.data(),
            time_per_output_token_s=self._per_token.data(),
            queue_time_s=self._queue.data(),
            prefill_time_s=self._prefill.data(),
            decode_time_s=self._decode.data(),
            inference_time_s=self._inference.data(),
            e2e_request_latency_s=self._end_to_end.data(),
            request_prompt_tokens=self._prompt_sizes.data(),
            request_generation_tokens=self._answer_sizes.data(),
            max_num_generation_tokens=self._longest_choices.data(),
            prefill_kv_computed_tokens=self._computed.data(),
            params_n=self._asked_n.data(),
            params_max_tokens=self._asked_tokens.data(),
        )
