"""Histograms count what they are shown; the meter counts each request once."""

from __future__ import annotations

from llaisys.meter import Meter
from llaisys.stats import EngineStats, Histogram


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 99.0):
        histogram.observe(value)
    data = histogram.data()
    assert (data.counts, data.count, data.sum) == ((2, 2, 2), 6, 106.5)


def test_a_requests_course() -> None:
    meter = Meter()
    meter.submitted("a", 7, 100.0)
    meter.tokens("a", 0, 100.5)
    meter.tokens("a", 1, 101.0, queued_s=0.25)
    meter.tokens("a", 2, 102.0)
    meter.finished("a", "stop", 103.0)
    meter.finished("a", "abort", 104.0)
    meter.finished("never taken", "abort", 104.0)
    meter.tokens("never taken", 5, 104.0)
    engine = EngineStats(num_running=1, num_waiting=2, kv_cells=10, kv_cells_used=3)
    stats = meter.snapshot(engine)
    assert stats.engine is engine
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (7, 3, {"stop": 1})
    assert (stats.time_to_first_token_s.count, stats.time_to_first_token_s.sum) == (1, 1.0)
    assert (stats.inter_token_latency_s.count, stats.inter_token_latency_s.sum) == (1, 0.5)
    assert (stats.e2e_request_latency_s.count, stats.e2e_request_latency_s.sum) == (1, 3.0)
    parts = (stats.queue_time_s, stats.prefill_time_s, stats.decode_time_s, stats.inference_time_s)
    assert [(part.count, part.sum) for part in parts] == [(1, 0.25), (1, 0.75), (1, 1.0), (1, 1.75)]
    assert (stats.time_per_output_token_s.count, stats.time_per_output_token_s.sum) == (1, 0.5)


def test_a_request_that_gave_nothing_counts_no_prompt() -> None:
    meter = Meter()
    meter.submitted("a", 7, 0.0)
    meter.finished("a", "timeout", 600.0)
    stats = meter.snapshot(EngineStats())
    assert (stats.prompt_tokens, stats.finished) == (0, {"timeout": 1})
    assert stats.queue_time_s.count == stats.decode_time_s.count == 0


def test_one_token_has_no_time_per_further_one() -> None:
    meter = Meter()
    meter.submitted("a", 7, 0.0)
    meter.tokens("a", 1, 1.0)
    meter.finished("a", "length", 1.0)
    stats = meter.snapshot(EngineStats())
    assert (stats.decode_time_s.count, stats.time_per_output_token_s.count) == (1, 0)
