"""GET /metrics: vLLM's names, labels and buckets, so that its dashboards draw us; ours as `llaisys:...`.

Nothing is counted twice: engine figures are read from AsyncLLM's snapshot when asked for; only what the
engine never sees (refusals, HTTP answers) is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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

LABELS = ("model_name", "engine")

router = APIRouter()


class EngineCollector:
    """Turns one snapshot into metric families. `values` are those of LABELS."""

    def __init__(self, stats: ServiceStats, values: tuple[str, str]) -> None:
        self._stats = stats
        self._values = values

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        stats = self._stats
        used = stats.kv_cells_used / stats.kv_cells if stats.kv_cells else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to run.", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cells in use, 0 to 1.", used)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._success()
        yield self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", stats.time_to_first_token_s
        )
        yield self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of one answer.", stats.inter_token_latency_s
        )
        yield self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", stats.e2e_request_latency_s
        )
        yield self._cells()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _success(self) -> Metric:
        """Every reason from the start, so that a rate over it exists before the first of its kind."""
        family = CounterMetricFamily(
            "vllm:request_success", "Requests ended.", labels=(*LABELS, "finished_reason")
        )
        for reason in FinishReason:
            family.add_metric((*self._values, reason.value), self._stats.finished.get(reason.value, 0))
        return family

    def _histogram(self, name: str, text: str, data: HistogramData) -> Metric:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, buckets=list(cumulative(data)), sum_value=data.sum)
        return family

    def _cells(self) -> Metric:
        family = GaugeMetricFamily("llaisys:kv_cells", "KV cells, one token each.", labels=(*LABELS, "state"))
        family.add_metric((*self._values, "used"), self._stats.kv_cells_used)
        family.add_metric((*self._values, "free"), self._stats.kv_cells - self._stats.kv_cells_used)
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

    def page(self, engines: Iterable[EngineCollector]) -> bytes:
        """The text format: our own counters, then each engine's."""
        registry = CollectorRegistry()
        for engine in engines:
            registry.register(engine)
        return generate_latest(self._registry) + generate_latest(registry)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Engine figures are absent until the model is loaded."""
    state = request.app.state.server
    engine = state.engine
    engines = [] if engine is None else [EngineCollector(engine.stats(), (engine.model_names[0], "0"))]
    return Response(state.metrics.page(engines), media_type=CONTENT_TYPE_LATEST)
