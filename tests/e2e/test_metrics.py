"""/metrics of a server after a known load, with every metric of the Grafana dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from golden import FOLDER
from serving import Server, serving

ROOT = Path(__file__).parents[2]
N_CELLS = 96
N_PROMPT, N_OUTPUT = 20, 60


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the same prompt twice, then two prompts together of which one must be preempted."""
    folder = tmp_path_factory.mktemp("metrics")
    with serving(folder, str(FOLDER), "--num-kv-cells", f"{N_CELLS}", "--dtype", "float32") as server:
        for firsts, max_tokens in ([10], 4), ([10], 1), ([200, 300], N_OUTPUT):
            prompts = [[first + i for i in range(N_PROMPT)] for first in firsts]
            body = {"prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
            response = server.http.post("/v1/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == len(firsts) * max_tokens, response.text
        yield server


# Metrics of the known load: name, labels, and the sum over all other labels.
METRICS: list[tuple[str, dict[str, str], float]] = [
    ("vllm:num_requests_running", {}, 0),
    ("vllm:num_requests_waiting", {}, 0),
    *(
        ("vllm:num_requests_waiting_by_reason", {"reason": reason}, 0)
        for reason in ("capacity", "preempted", "sibling", "remote_kv")
    ),
    ("vllm:kv_cache_usage_perc", {}, 0),
    ("vllm:prompt_tokens_total", {}, 4 * N_PROMPT),
    ("vllm:generation_tokens_total", {}, 5 + 2 * N_OUTPUT),
    ("vllm:prefix_cache_queries_total", {}, 4 * N_PROMPT),
    ("vllm:prefix_cache_hits_total", {}, N_PROMPT - 1),
    ("vllm:request_success_total", {"finished_reason": "length"}, 4),
    ("vllm:request_success_total", {"finished_reason": "stop"}, 0),
    ("vllm:time_to_first_token_seconds_count", {}, 4),
    ("vllm:e2e_request_latency_seconds_count", {}, 4),
    ("vllm:request_queue_time_seconds_count", {}, 4),
    ("vllm:request_prefill_time_seconds_count", {}, 4),
    ("vllm:request_decode_time_seconds_count", {}, 4),
    ("vllm:request_inference_time_seconds_count", {}, 4),
    ("vllm:request_time_per_output_token_seconds_count", {}, 3),
    ("vllm:request_prompt_tokens_sum", {}, 4 * N_PROMPT),
    ("vllm:request_generation_tokens_sum", {}, 5 + 2 * N_OUTPUT),
    ("vllm:request_max_num_generation_tokens_sum", {}, 5 + 2 * N_OUTPUT),
    ("vllm:request_prefill_kv_computed_tokens_sum", {}, 4 * N_PROMPT - (N_PROMPT - 1)),
    ("vllm:request_params_n_sum", {}, 4),
    ("vllm:request_params_max_tokens_sum", {}, 5 + 2 * N_OUTPUT),
    ("vllm:cache_config_info", {"num_gpu_blocks": str(N_CELLS)}, 1),
    ("http_requests_total", {"handler": "/v1/completions", "method": "POST", "status": "2xx"}, 3),
    ("http_request_duration_seconds_count", {"handler": "/v1/completions", "method": "POST"}, 3),
    ("llaisys:kv_cells", {}, N_CELLS),
    ("llaisys:kv_cells", {"state": "used"}, 0),
]


def test_metrics_of_the_known_load(loaded: Server) -> None:
    for name, labels, value in METRICS:
        samples = loaded.samples(name, **labels)
        assert samples, f"{name}: the metric is missing"
        assert sum(samples) == value, (name, labels)


def test_metrics_that_depend_on_the_steps(loaded: Server) -> None:
    """The steps of the two requests that ran together are not deterministic, but they have bounds."""
    computed = loaded.metric("vllm:iteration_tokens_total_sum")
    steps = loaded.metric("vllm:iteration_tokens_total_count")
    # Every token except the last of each completion and the cached ones; preempted ones are computed again.
    assert computed >= 4 * N_PROMPT + 5 + 2 * N_OUTPUT - 4 - (N_PROMPT - 1)
    assert N_OUTPUT <= steps <= loaded.metric("llaisys:steps_total")
    for phase in ("plan", "execute", "settle"):
        assert loaded.metric("llaisys:step_seconds_count", phase=phase) == steps
    assert 0 < loaded.metric("llaisys:step_seconds_count", phase="deliver") <= steps
    assert loaded.metric("llaisys:step_seconds_sum", phase="execute") > 0
    assert loaded.metric("vllm:inter_token_latency_seconds_count") > 0
    assert loaded.metric("vllm:num_preemptions_total") >= 1
    assert loaded.metric("llaisys:kv_cells_evicted_total") >= 1
    cached = loaded.metric("llaisys:kv_cells", state="cached")
    assert loaded.metric("llaisys:kv_cells_retained") == cached > 0


def test_the_labels_are_the_model_name_and_the_engine(loaded: Server) -> None:
    for name in ("vllm:num_preemptions_total", "llaisys:kv_cells", "vllm:iteration_tokens_total_sum"):
        assert loaded.samples(name) == loaded.samples(name, model_name=loaded.model, engine="0")


def test_every_metric_of_the_dashboard_is_served(loaded: Server) -> None:
    """configs/grafana.json uses only names and labels that are served, and nearly all of them."""
    board = json.loads((ROOT / "configs" / "grafana.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    expressions.append(board["templating"]["list"][1]["query"]["query"])
    text = loaded.http.get("/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    labels = {sample.name: sample.labels.keys() for sample in samples}
    drawn = set()
    for expression in expressions:
        names = re.findall(r"\b(?:vllm:|llaisys:|http_|process_)\w+", expression)
        assert names, expression
        assert set(names) <= labels.keys(), expression
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert all(set(grouped.split(", ")) <= labels[name] for name in names), expression
        drawn |= {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in names}
    served = {family.name for family in text_string_to_metric_families(text)}
    ours = {name for name in served if name.startswith(("vllm:", "llaisys:"))}
    # Without speculative decoding there is no position of a draft.
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert ours - drawn <= {"vllm:num_requests_waiting", "vllm:iteration_tokens_total", by_position}
