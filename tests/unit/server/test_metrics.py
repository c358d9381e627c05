"""GET /metrics: the names, labels and buckets that vLLM dashboards query."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from llaisys.server.metrics import cumulative
from llaisys.stats import HistogramData

LABELS = {"model_name": "tiny", "engine": "0"}


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await client.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# Each metric of the fake engine's stats: name, labels in addition to LABELS, and value.
METRICS: list[tuple[str, dict[str, str], float]] = [
    ("vllm:num_requests_running", {}, 2),
    ("vllm:num_requests_waiting", {}, 5),
    ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}, 1),
    ("vllm:num_requests_waiting_by_reason", {"reason": "preempted"}, 2),
    ("vllm:num_requests_waiting_by_reason", {"reason": "sibling"}, 2),
    ("vllm:num_requests_waiting_by_reason", {"reason": "remote_kv"}, 0),
    ("vllm:num_preemptions_total", {}, 6),
    ("vllm:prefix_cache_queries_total", {}, 500),
    ("vllm:prefix_cache_hits_total", {}, 400),
    ("vllm:external_prefix_cache_queries_total", {}, 100),
    ("vllm:external_prefix_cache_hits_total", {}, 70),
    ("vllm:kv_cache_usage_perc", {}, 0.25),
    ("vllm:prompt_tokens_total", {}, 11),
    ("vllm:generation_tokens_total", {}, 7),
    ("vllm:request_success_total", {"finished_reason": "stop"}, 3),
    ("vllm:request_success_total", {"finished_reason": "length"}, 1),
    ("vllm:request_success_total", {"finished_reason": "abort"}, 0),
    ("vllm:time_to_first_token_seconds_bucket", {"le": "0.5"}, 1),
    ("vllm:time_to_first_token_seconds_bucket", {"le": "1.0"}, 3),
    ("vllm:time_to_first_token_seconds_bucket", {"le": "+Inf"}, 6),
    ("vllm:time_to_first_token_seconds_count", {}, 6),
    ("vllm:time_to_first_token_seconds_sum", {}, 9.5),
    ("vllm:inter_token_latency_seconds_count", {}, 0),
    ("vllm:e2e_request_latency_seconds_count", {}, 0),
    ("vllm:request_time_per_output_token_seconds_sum", {}, 0.25),
    ("vllm:request_queue_time_seconds_sum", {}, 1.5),
    ("vllm:request_prefill_time_seconds_sum", {}, 2.5),
    ("vllm:request_decode_time_seconds_sum", {}, 3.5),
    ("vllm:request_inference_time_seconds_sum", {}, 4.5),
    ("vllm:request_prompt_tokens_sum", {}, 10.5),
    ("vllm:request_generation_tokens_sum", {}, 11.5),
    ("vllm:request_max_num_generation_tokens_sum", {}, 12.5),
    ("vllm:request_prefill_kv_computed_tokens_sum", {}, 13.5),
    ("vllm:request_params_n_sum", {}, 14.5),
    ("vllm:request_params_max_tokens_sum", {}, 15.5),
    (
        "vllm:cache_config_info",
        {
            "block_size": "1",
            "num_gpu_blocks": "100",
            "enable_prefix_caching": "True",
            "cache_dtype": "auto",
        },
        1,
    ),
    ("vllm:iteration_tokens_total_sum", {}, 90),
    ("vllm:iteration_tokens_total_bucket", {"le": "8.0"}, 7),
    ("llaisys:step_seconds_count", {"phase": "plan"}, 4),
    ("llaisys:step_seconds_sum", {"phase": "plan"}, 2.5),
    ("llaisys:cancel_latency_seconds_sum", {}, 3.25),
    ("llaisys:seq_ids_free", {}, 14),
    ("llaisys:invariant_violations_total", {}, 3),
    ("llaisys:steps_total", {}, 40),
    ("llaisys:kv_cells_evicted_total", {}, 80),
    ("llaisys:kv_cells_retained", {}, 60),
    ("llaisys:kv_cells", {"state": "used"}, 25),
    ("llaisys:kv_cells", {"state": "cached"}, 45),
    ("llaisys:kv_cells", {"state": "free"}, 30),
    ("llaisys:recurrent_states", {"state": "cached"}, 7),
    ("llaisys:recurrent_states", {"state": "free"}, 9),
]


async def test_metrics_of_the_engine(client: httpx.AsyncClient) -> None:
    found = await samples(client)
    expected = {(name, frozenset({**LABELS, **labels}.items())): value for name, labels, value in METRICS}
    assert {key: found.get(key) for key in expected} == expected


async def test_rejections_and_responses_are_counted_by_route(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": []})
    for path in ("/nothing/1", "/nothing/2"):
        await client.get(path)
    await client.request("BREW", "/v1/models")
    found = await samples(client)
    assert found["llaisys:rejected_total", frozenset({("reason", "invalid_value")})] == 1
    responses = {labels: value for (name, labels), value in found.items() if name == "http_requests_total"}
    assert responses[frozenset({("handler", "/v1/completions"), ("method", "POST"), ("status", "4xx")})] == 1
    assert responses[frozenset({("handler", "other"), ("method", "GET"), ("status", "4xx")})] == 2
    assert not any("nothing" in str(labels) or "BREW" in str(labels) for labels in responses)
    route = frozenset({("handler", "other"), ("method", "GET")})
    assert found["http_request_duration_seconds_count", route] == 2


def test_histogram_buckets_are_cumulative() -> None:
    assert list(cumulative(HistogramData((1.0, 2.0), (1, 0, 2), 7.0))) == [
        ("1.0", 1),
        ("2.0", 1),
        ("+Inf", 3),
    ]
