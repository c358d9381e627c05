"""Histograms count observations; request stats count each request once."""

from __future__ import annotations

import pytest

from llaisys.outputs import CompletionOutput, RequestOutput, RequestStateStats
from llaisys.sampling_params import SamplingParams
from llaisys.stats import EngineStats, Histogram, RequestStats, token_bounds


def test_a_value_equal_to_a_bucket_bound_is_in_that_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 99.0):
        histogram.observe(value)
    data = histogram.data()
    assert (data.counts, data.count, data.sum) == ((2, 2, 2), 6, 106.5)


def test_token_buckets_end_at_the_longest_request() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(64) == (1, 2, 5, 10, 20, 50)
    assert token_bounds(1) == (1,)


def news(n_tokens: int, *, index: int = 0, queued_s: float = 0.0, n_cached: int = 0) -> RequestOutput:
    """Return a delta of the request `a`."""
    answer = CompletionOutput(index, "", list(range(n_tokens)))
    return RequestOutput(
        "a", None, [], [answer], finished=False, num_cached_tokens=n_cached, queued_s=queued_s
    )


def test_the_stats_of_one_request() -> None:
    stats = RequestStats(100)
    stats.record_submission("a", 7, SamplingParams(n=2, max_tokens=9), 100.0)
    stats.record_tokens(news(0), 100.5)
    stats.record_tokens(news(1, queued_s=0.25, n_cached=3), 101.0)
    stats.record_tokens(news(2), 102.0)
    stats.record_tokens(news(1, index=1), 102.0)
    stats.record_end("a", "stop", 103.0)
    stats.record_end("a", "abort", 104.0)
    stats.record_end("unknown", "abort", 104.0)
    stats.record_tokens(news(5), 104.0)
    engine = EngineStats(num_running=1, num_waiting=2, kv_cells=10, kv_cells_used=3)
    stats = stats.snapshot(engine, 2)
    assert stats.engine is engine
    assert stats.invariant_violations == 2
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (7, 4, {"stop": 1})
    assert (stats.time_to_first_token_s.count, stats.time_to_first_token_s.sum) == (1, 1.0)
    assert (stats.inter_token_latency_s.count, stats.inter_token_latency_s.sum) == (2, 0.5)
    assert (stats.e2e_request_latency_s.count, stats.e2e_request_latency_s.sum) == (1, 3.0)
    parts = (stats.queue_time_s, stats.prefill_time_s, stats.decode_time_s, stats.inference_time_s)
    assert [(part.count, part.sum) for part in parts] == [(1, 0.25), (1, 0.75), (1, 1.0), (1, 1.75)]
    assert stats.time_per_output_token_s.sum == pytest.approx(1 / 3)
    sizes = (stats.request_prompt_tokens, stats.request_generation_tokens, stats.max_num_generation_tokens)
    assert [(size.count, size.sum) for size in sizes] == [(1, 7), (1, 4), (1, 3)]
    sizes = (stats.params_n, stats.params_max_tokens, stats.prefill_kv_computed_tokens)
    assert [(size.count, size.sum) for size in sizes] == [(1, 2), (1, 9), (1, 4)]


def test_outputs_have_the_times_of_their_request() -> None:
    stats, first, last = RequestStats(100), news(2, queued_s=0.25), news(1)
    stats.record_submission("a", 7, SamplingParams(), 100.0, 1.7e9)
    nothing = news(0)
    stats.record_tokens(nothing, 100.5)
    assert nothing.metrics == RequestStateStats(1.7e9, 100.0)
    stats.record_tokens(first, 101.0)
    assert first.metrics == RequestStateStats(1.7e9, 100.0, 100.25, 101.0, 101.0, 1.0, 2)
    stats.record_tokens(last, 104.0)
    assert last.metrics == RequestStateStats(1.7e9, 100.0, 100.25, 101.0, 104.0, 1.0, 3)
    assert last.metrics is first.metrics


def test_a_request_without_a_token_counts_no_prompt() -> None:
    stats = RequestStats(100)
    stats.record_submission("a", 7, SamplingParams(max_tokens=None), 0.0)
    stats.record_end("a", "timeout", 600.0)
    stats = stats.snapshot(EngineStats(), 0)
    assert (stats.prompt_tokens, stats.finished) == (0, {"timeout": 1})
    assert stats.queue_time_s.count == stats.decode_time_s.count == 0
    assert (stats.request_prompt_tokens.count, stats.request_generation_tokens.sum) == (1, 0)
    assert stats.params_max_tokens.count == stats.prefill_kv_computed_tokens.count == 0


def test_a_single_token_has_no_time_per_output_token() -> None:
    stats = RequestStats(100)
    stats.record_submission("a", 7, SamplingParams(), 0.0)
    stats.record_tokens(news(1), 1.0)
    stats.record_end("a", "length", 1.0)
    stats = stats.snapshot(EngineStats(), 0)
    assert (stats.decode_time_s.count, stats.time_per_output_token_s.count) == (1, 0)
