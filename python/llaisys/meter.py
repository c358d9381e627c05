"""What a service counts: tokens, ends, latencies. No clock: every call brings its time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llaisys.stats import (
    END_TO_END_BOUNDS_S,
    FIRST_TOKEN_BOUNDS_S,
    INTER_TOKEN_BOUNDS_S,
    EngineStats,
    Histogram,
    ServiceStats,
)
from llaisys.types import RequestId


@dataclass(slots=True)
class _Course:
    """Times of one open request, in seconds of the caller's clock."""

    n_prompt: int
    arrival_s: float
    admitted_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    n_generated: int = 0


class Meter:
    """Owns the totals and the courses of the open requests. One thread."""

    def __init__(self) -> None:
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

    def submitted(self, request_id: RequestId, n_prompt: int, arrival_s: float) -> None:
        """A request was taken."""
        self._courses[request_id] = _Course(n_prompt, arrival_s)

    def tokens(self, request_id: RequestId, n_tokens: int, now_s: float, queued_s: float = 0.0) -> None:
        """`n_tokens` of its answer arrived together; with the first of them, how long it had waited."""
        course = self._courses.get(request_id)
        if course is None or n_tokens == 0:
            return
        if course.first_token_s is None:
            self._prompt_tokens += course.n_prompt
            course.first_token_s, course.admitted_s = now_s, course.arrival_s + queued_s
            self._first_token.observe(now_s - course.arrival_s)
            self._queue.observe(queued_s)
            self._prefill.observe(now_s - course.admitted_s)
        else:
            self._inter_token.observe((now_s - course.last_token_s) / n_tokens)
        course.last_token_s = now_s
        course.n_generated += n_tokens
        self._generation_tokens += n_tokens

    def embedded(self, request_id: RequestId, now_s: float, queued_s: float) -> None:
        """Its embedding arrived, which is all of its answer."""
        course = self._courses.get(request_id)
        if course is None:
            return
        self._prompt_tokens += course.n_prompt
        self._queue.observe(queued_s)
        self._prefill.observe(now_s - course.arrival_s - queued_s)

    def finished(self, request_id: RequestId, reason: str, now_s: float) -> None:
        """It ended; a second end, or one of a request that was never taken, is not counted."""
        course = self._courses.pop(request_id, None)
        if course is None:
            return
        self._finished[reason] += 1
        self._end_to_end.observe(now_s - course.arrival_s)
        if course.first_token_s is not None:
            decode_s = course.last_token_s - course.first_token_s
            self._decode.observe(decode_s)
            self._inference.observe(course.last_token_s - course.admitted_s)
            if course.n_generated > 1:
                self._per_token.observe(decode_s / (course.n_generated - 1))

    def snapshot(self, engine: EngineStats) -> ServiceStats:
        """Everything now, with the engine's books."""
        return ServiceStats(
            engine=engine,
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
        )
