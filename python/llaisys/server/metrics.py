"""GET /metrics: vLLM's names, labels and buckets, so that its dashboards draw us; ours as `llaisys:...`.

Nothing is counted twice: engine figures are read from AsyncLLM's snapshot when asked for; only what the
engine never sees (refusals, HTTP answers) is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from llaisys.stats import HistogramData, ServiceStats
from llaisys.types import FinishReason

if TYPE_CHECKING:
    from llaisys.server.state import ServerState

LABELS = ("model_name", "engine")

router = APIRouter()


class EngineCollector:
    """Turns a snapshot of each model into metric families. `snapshots`: (values of LABELS, snapshot)."""

    def __init__(self, snapshots: Sequence[tuple[tuple[str, str], ServiceStats]]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", "num_running")
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to run.", "num_waiting")
        yield self._usage()
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens")
        yield self._counter("vllm:generation_tokens", "Tokens generated.", "generation_tokens")
        yield self._success()
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", "time_to_first_token_s"
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of one answer.", "inter_token_latency_s"
        )
        yield self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", "e2e_request_latency_s"
        )
        yield self._cells()

    def _gauge(self, name: str, text: str, field: str) -> Metric:
        """`field`: of ServiceStats."""
        family = GaugeMetricFamily(name, text, labels=LABELS)
        for values, stats in self._snapshots:
            family.add_metric(values, getattr(stats, field))
        return family

    def _usage(self) -> Metric:
        text = "Share of the KV cells in use, 0 to 1."
        family = GaugeMetricFamily("vllm:kv_cache_usage_perc", text, labels=LABELS)
        for values, stats in self._snapshots:
            family.add_metric(values, stats.kv_cells_used / stats.kv_cells if stats.kv_cells else 0.0)
        return family

    def _counter(self, name: str, text: str, field: str) -> Metric:
        """`field`: of ServiceStats."""
        family = CounterMetricFamily(name, text, labels=LABELS)
        for values, stats in self._snapshots:
            family.add_metric(values, getattr(stats, field))
        return family

    def _success(self) -> Metric:
        """Every reason from the start, so that a rate over it exists before the first of its kind."""
        family = CounterMetricFamily(
            "vllm:request_success", "Requests ended.", labels=(*LABELS, "finished_reason")
        )
        for values, stats in self._snapshots:
            for reason in FinishReason:
                family.add_metric((*values, reason.value), stats.finished.get(reason.value, 0))
        return family

    def _histogram(self, name: str, text: str, field: str) -> Metric:
        """`field`: of ServiceStats."""
        family = HistogramMetricFamily(name, text, labels=LABELS)
        for values, stats in self._snapshots:
            data: HistogramData = getattr(stats, field)
            family.add_metric(values, buckets=list(cumulative(data)), sum_value=data.sum)
        return family

    def _cells(self) -> Metric:
        family = GaugeMetricFamily("llaisys:kv_cells", "KV cells, one token each.", labels=(*LABELS, "state"))
        for values, stats in self._snapshots:
            family.add_metric((*values, "used"), stats.kv_cells_used)
            family.add_metric((*values, "free"), stats.kv_cells - stats.kv_cells_used)
        return family


def cumulative(data: HistogramData) -> Iterator[tuple[str, float]]:
    """`(upper bound, observations up to it)`, as the text format wants them; the last bound is `+Inf`."""
    total = 0
    for bound, count in zip((*map(str, data.bounds), "+Inf"), data.counts, strict=True):
        total += count
        yield bound, total


class Metrics:
    """What the server counts itself, and the page of both."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._answers = Counter(
            "llaisys:http_responses", "HTTP answers.", ("path", "method", "status"), registry=self._registry
        )
        self._refused = Counter(
            "llaisys:rejected",
            "Requests refused or failed, by error code.",
            ("reason",),
            registry=self._registry,
        )

    def answered(self, path: str, method: str, status: int) -> None:
        """Counts an HTTP answer. `path` is a route, never what a client wrote."""
        self._answers.labels(path, method, str(status)).inc()

    def refused(self, code: str) -> None:
        """Counts an error by its wire code."""
        self._refused.labels(code).inc()

    def page(self, engines: EngineCollector | None) -> bytes:
        """The text format: our own counters, then the engines'."""
        registry = CollectorRegistry()
        if engines is not None:
            registry.register(engines)
        return generate_latest(self._registry) + generate_latest(registry)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Engine figures are absent until the models are loaded; afterwards each model has its own."""
    state: ServerState = request.app.state.server
    engines = None
    if state.models is not None:
        services = state.models.services
        engines = EngineCollector([((each.model_names[0], "0"), each.stats()) for each in services])
    return Response(state.metrics.page(engines), media_type=CONTENT_TYPE_LATEST)
