"""Benchmark metrics of requests with hand-written times."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from llaisys.bench.benchmark_metrics import compute_metrics, output_rate, request_details
from llaisys.bench.plot import svg
from llaisys.bench.report import serve_text
from llaisys.bench.request_record import RequestRecord


def record(start_s: float, chunks_s: list[float], n_output: int, **fields: object) -> RequestRecord:
    """Return a record sent at `start_s` with text at each of `chunks_s`; the last one is the end."""
    made = RequestRecord(due_s=start_s, start_s=start_s, chunk_times_s=chunks_s, end_s=chunks_s[-1])
    made.prompt_tokens, made.output_tokens = 10, n_output
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# TTFT 0.1, 0.2, 0.4 s; TPOT (0.5-0.1)/4 = 0.1, (1.2-0.2)/2 = 0.5, none; E2EL 0.5, 1.2, 0.4 s.
DONE = [
    record(0.0, [0.1, 0.2, 0.3, 0.4, 0.5], 5),
    record(1.0, [1.2, 1.7, 2.2], 3),
    record(1.1, [1.5], 1),
]
FAILED = RequestRecord(due_s=0.0, start_s=0.0, end_s=0.01, status=429, error="429: the queue is full")


def of(objectives_ms: dict[str, float] | None = None) -> dict[str, float]:
    return compute_metrics([*DONE, FAILED], 2.0, [50, 99, 99.9], objectives_ms or {})


def test_failed_requests_count_as_failed_only() -> None:
    result = of()
    assert (result["completed"], result["failed"]) == (3, 1)
    assert result["failures"] == {"429: the queue is full": 1}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 9)
    assert result["request_throughput"] == 1.5
    assert result["output_throughput"] == 4.5
    assert result["total_token_throughput"] == 19.5


def test_time_to_first_token() -> None:
    result = of()
    assert result["mean_ttft_ms"] == pytest.approx(700 / 3)
    assert result["median_ttft_ms"] == pytest.approx(200)
    assert result["std_ttft_ms"] == pytest.approx(124.7219, abs=1e-3)  # population standard deviation
    # Linear between ranks: 99 % of the way through 3 values is 0.98 of the way from the second to the third.
    assert result["p99_ttft_ms"] == pytest.approx(200 + 0.98 * 200)
    assert result["p99.9_ttft_ms"] == pytest.approx(200 + 0.998 * 200)


def test_time_per_output_token_excludes_completions_of_one_token() -> None:
    result = of()
    assert result["mean_tpot_ms"] == pytest.approx(300)
    assert result["median_tpot_ms"] == pytest.approx(300)


def test_inter_token_latency_is_over_all_gaps() -> None:
    assert of()["mean_itl_ms"] == pytest.approx(1000 * (4 * 0.1 + 2 * 0.5) / 6)


def test_chunks_of_several_tokens_count_by_usage() -> None:
    several = record(0.0, [0.1, 0.5], 9)
    assert several.tpot_s == pytest.approx(0.05)
    assert several.itls_s == pytest.approx([0.4])


@pytest.mark.parametrize(
    ("objectives_ms", "n_good"),
    [
        ({"ttft": 200.5}, 2),
        ({"e2el": 500.5}, 2),
        ({"tpot": 150}, 2),  # a completion of one token has no TPOT
        ({"ttft": 150, "tpot": 150}, 1),
        ({"ttft": 1000, "tpot": 1000, "e2el": 2000}, 3),
        ({"ttft": 50}, 0),
    ],
)
def test_goodput_counts_completions_within_every_objective(
    objectives_ms: dict[str, float], n_good: int
) -> None:
    assert of(objectives_ms)["request_goodput"] == n_good / 2.0


def test_without_objectives_there_is_no_goodput() -> None:
    assert of()["request_goodput"] is None


def test_peak_concurrency_and_output_rate_are_computed() -> None:
    result = of()
    assert result["max_concurrent_requests"] == 2
    # Tokens in seconds 0, 1 and 2 after the first request: 5; two thirds of 3, and 1; one third of 3.
    assert output_rate(DONE) == pytest.approx([5, 3, 1])
    assert result["max_output_tokens_per_s"] == 5


def test_a_request_that_starts_when_another_ends_does_not_overlap_it() -> None:
    assert (
        compute_metrics([record(0, [1.0], 1), record(1.0, [2.0], 1)], 2.0, [99], {})[
            "max_concurrent_requests"
        ]
        == 1
    )


def test_metrics_of_no_requests_are_zero() -> None:
    result = compute_metrics([FAILED], 1.0, [99], {"ttft": 1})
    assert result["completed"] == result["request_goodput"] == result["p99_ttft_ms"] == 0
    assert "NaN" not in json.dumps(result)


def test_request_details_have_one_entry_per_request() -> None:
    lists = request_details([*DONE, FAILED])
    assert {len(values) for values in lists.values()} == {4}
    assert lists["errors"][3] == "429: the queue is full"


def test_the_plot_is_xml_with_all_panels() -> None:
    root = ElementTree.fromstring(svg([*DONE, FAILED], "a <model>"))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a <model>"
    assert "TTFT, ms (p50 200, p99 396)" in texts
    assert ElementTree.fromstring(svg([FAILED], "nothing done")) is not None


def test_report_names_metrics_and_warns_of_a_saturated_client() -> None:
    client = {"cpu_share": 0.9, "loop_lag_p99_ms": 1.0, "loop_lag_max_ms": 2.0, "send_lag_p99_ms": 0.0}
    text = serve_text({**of(), "seed": 7, "client": {**client, "limited": True}}, ["ttft", "tpot"])
    assert "P99 TTFT (ms):" in text
    assert "P99.9 TPOT (ms):" in text
    assert "ITL" not in text
    assert "seed 7" in text
    assert "failed 1 times: 429: the queue is full" in text
    assert "the client was a bottleneck" in text
