"""GET /metrics: vLLM's names, labels and buckets, so that its dashboards draw us; ours as `llaisys:...`.

Nothing is counted twice: engine figures are read from AsyncLLM's snapshot when asked for; only what the
engine never sees (refusals, HTTP answers) is counted here. Absent because there is nothing to count: vLLM's
figures of LoRA, speculative decoding, sleep and corrupted logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from fastapi import APIRouter
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.answers import text_of_type
from llaisys.server.errors import TABLE
from llaisys.stats import HistogramData, ServiceStats
from llaisys.types import FinishReason

if TYPE_CHECKING:
    from llaisys.logs import LineWriter
    from llaisys.server.connection_limit import ConnectionStats
    from llaisys.server.state import ServerState
    from llaisys.service import AsyncLLM

LABELS = ("model_name", "engine")
# What a GPU server counts in blocks of several tokens is a cell of one here.
CACHE_FACTS = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype")
# Those of the instrumentator that vLLM uses for HTTP.
HTTP_BOUNDS_S = (0.1, 0.5, 1.0)
# The end of a stream whose client has taken nothing for `send_timeout_s`; nobody is there to be told.
STALLED = "send_timeout"
LAG_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

_Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily

router = APIRouter()
# A series `_created` beside each counter, which nobody draws; vLLM has none either.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's own


def _usage(stats: ServiceStats) -> float:
    return stats.engine.kv_cells_used / stats.engine.kv_cells if stats.engine.kv_cells else 0.0


def _cells(stats: ServiceStats) -> dict[str, int]:
    """Every cell is in one state: `cached` ones are held by the prefix cache alone."""
    used, free = stats.engine.kv_cells_used, stats.engine.kv_cells_free
    return {"used": used, "cached": stats.engine.kv_cells - used - free, "free": free}


def _finished(stats: ServiceStats) -> dict[str, int]:
    """Every reason from the start, so that a rate over it exists before the first of its kind."""
    return {reason.value: stats.finished.get(reason.value, 0) for reason in FinishReason}


# (name, what it is, its value of a ServiceStats); counters are exposed with `_total`.
GAUGES: tuple[tuple[str, str, Callable[[ServiceStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.engine.num_running),
    ("vllm:num_requests_waiting", "Requests waiting to run.", lambda s: s.engine.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV cells in use, 0 to 1.", _usage),
    ("llaisys:seq_ids_free", "Sequences that may run beside those that do.", lambda s: s.engine.seq_ids_free),
    (
        "llaisys:kv_cells_retained",
        "KV cells that the prefix cache holds, in use or not.",
        lambda s: s.engine.kv_cells_retained,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[ServiceStats], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("vllm:num_preemptions", "Times that a running request gave way.", lambda s: s.engine.num_preempted),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.engine.prefix_query_tokens,
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens found there.", lambda s: s.engine.prefix_hit_tokens),
    ("llaisys:kv_cells_evicted", "KV cells that the cache gave back.", lambda s: s.engine.num_evicted_cells),
    (
        "llaisys:invariant_violations",
        "Times that an engine's books were found wrong: a bug.",
        lambda s: s.invariant_violations,
    ),
    ("llaisys:steps", "Steps of the engine.", lambda s: s.engine.num_steps),
)
# The same with a label beside LABELS, and a value for each of its words.
BY_LABEL: tuple[tuple[type[_Family], str, str, str, Callable[[ServiceStats], Mapping[str, float]]], ...] = (
    (
        GaugeMetricFamily,
        "vllm:num_requests_waiting_by_reason",
        "Choices that wait, by what they wait for.",
        "reason",
        lambda s: s.engine.waiting_by_reason,
    ),
    (CounterMetricFamily, "vllm:request_success", "Requests ended.", "finished_reason", _finished),
    (GaugeMetricFamily, "llaisys:kv_cells", "KV cells, one token each.", "state", _cells),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[ServiceStats], HistogramData]], ...] = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", lambda s: s.time_to_first_token_s),
    ("vllm:inter_token_latency_seconds", "Between tokens of one answer.", lambda s: s.inter_token_latency_s),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean of one answer, after its first token.",
        lambda s: s.time_per_output_token_s,
    ),
    ("vllm:e2e_request_latency_seconds", "Arrival to the end.", lambda s: s.e2e_request_latency_s),
    ("vllm:request_queue_time_seconds", "Arrival to first admission.", lambda s: s.queue_time_s),
    ("vllm:request_prefill_time_seconds", "First admission to first token.", lambda s: s.prefill_time_s),
    ("vllm:request_decode_time_seconds", "First token to last token.", lambda s: s.decode_time_s),
    ("vllm:request_inference_time_seconds", "First admission to last token.", lambda s: s.inference_time_s),
    ("vllm:request_prompt_tokens", "Prompt tokens of a request.", lambda s: s.request_prompt_tokens),
    (
        "vllm:request_generation_tokens",
        "Tokens generated for a request.",
        lambda s: s.request_generation_tokens,
    ),
    (
        "vllm:request_max_num_generation_tokens",
        "Tokens of a request's longest choice.",
        lambda s: s.max_num_generation_tokens,
    ),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were not cached.",
        lambda s: s.prefill_kv_computed_tokens,
    ),
    ("vllm:request_params_n", "n of a request.", lambda s: s.params_n),
    ("vllm:request_params_max_tokens", "max_tokens of a request.", lambda s: s.params_max_tokens),
    ("vllm:iteration_tokens_total", "Tokens of one step.", lambda s: s.engine.tokens_of_steps),
    (
        "llaisys:cancel_latency_seconds",
        "A cancel, until what it ends holds nothing.",
        lambda s: s.engine.seconds_of_cancels,
    ),
)


class EngineCollector:
    """Turns the models' figures of now into metric families."""

    def __init__(self, services: Sequence[AsyncLLM]) -> None:
        self._services = services
        self._snapshots = [((each.model_names[0], "0"), each.stats()) for each in services]

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector protocol."""
        yield self._cache_config()
        for name, text, value in GAUGES:
            yield self._family(GaugeMetricFamily, name, text, value)
        for name, text, value in COUNTERS:
            yield self._family(CounterMetricFamily, name, text, value)
        for kind, name, text, label, values_of in BY_LABEL:
            family = kind(name, text, labels=(*LABELS, label))
            for labels, stats in self._snapshots:
                for word, number in values_of(stats).items():
                    family.add_metric((*labels, word), number)
            yield family
        for name, text, data_of in HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, stats in self._snapshots:
                _observed(histogram, labels, data_of(stats))
            yield histogram
        phases = HistogramMetricFamily(
            "llaisys:step_seconds", "Seconds of one step, by what it does.", labels=(*LABELS, "phase")
        )
        for labels, stats in self._snapshots:
            for phase, data in stats.engine.seconds_of_phases.items():
                _observed(phases, (*labels, phase), data)
        yield phases

    def _cache_config(self) -> Metric:
        """Facts as labels of a constant 1."""
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache of a model.", labels=(*LABELS, *CACHE_FACTS)
        )
        for service, (labels, stats) in zip(self._services, self._snapshots, strict=True):
            config = service.config
            facts = (1, stats.engine.kv_cells, config.enable_prefix_caching, config.kv_cache_dtype)
            family.add_metric((*labels, *map(str, facts)), 1)
        return family

    def _family(
        self,
        kind: type[_Family],
        name: str,
        text: str,
        value: Callable[[ServiceStats], float],
    ) -> Metric:
        family = kind(name, text, labels=LABELS)
        for labels, stats in self._snapshots:
            family.add_metric(labels, value(stats))
        return family


class ConnectionCollector:
    """What connections and the log count, as metric families."""

    def __init__(self, stats: ConnectionStats, log: LineWriter) -> None:
        self._stats = stats
        self._log = log

    def collect(self) -> Iterator[Metric]:
        """prometheus_client."""
        stats = self._stats
        closed = CounterMetricFamily(
            "llaisys:connections_closed",
            "Connections closed by a bound: at accept, while idle, or for a bad request.",
            labels=("reason",),
        )
        for reason, value in (
            ("full", stats.refused),
            ("idle", stats.evicted),
            ("bad_request", stats.bad_requests),
        ):
            closed.add_metric((reason,), value)
        yield closed
        for name, text, value in (
            ("llaisys:connections", "Connections accepted.", stats.accepted),
            ("llaisys:requests_refused", "Requests refused: too many were open.", stats.requests_refused),
            ("llaisys:parser_headers", "Request headers parsed.", stats.headers),
            ("llaisys:parser_events", "Events of the HTTP parser, a request counted as 64.", stats.events),
            ("llaisys:log_lines_dropped", "Log lines that stderr did not take.", self._log.n_dropped),
        ):
            yield CounterMetricFamily(name, text, value=value)


def _observed(family: HistogramMetricFamily, labels: Sequence[str], data: HistogramData) -> None:
    family.add_metric(labels, buckets=list(cumulative(data)), sum_value=data.sum)


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
            "http_requests", "HTTP answers.", ("handler", "method", "status"), registry=self._registry
        )
        self._answer_s = Histogram(
            "http_request_duration_seconds",
            "HTTP request to the end of its answer.",
            ("handler", "method"),
            buckets=HTTP_BOUNDS_S,
            registry=self._registry,
        )
        self._refused = Counter(
            "llaisys:rejected",
            "Requests refused or failed, by error code.",
            ("reason",),
            registry=self._registry,
        )
        self._loop_lag = Histogram(
            "llaisys:event_loop_lag_seconds",
            "How late the event loop came round, looked at four times a second.",
            buckets=LAG_BOUNDS_S,
            registry=self._registry,
        )
        # So that a rate over them exists before the first.
        for code in (STALLED, *(row.code for row in TABLE.values())):
            self._refused.labels(code)

    def count_connections(self, stats: ConnectionStats, log: LineWriter) -> None:
        """Serve these counters, too."""
        self._registry.register(ConnectionCollector(stats, log))

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts an HTTP answer, by class of status (`2xx`). `route` is never what a client wrote."""
        self._answers.labels(route, method, f"{status // 100}xx").inc()
        self._answer_s.labels(route, method).observe(seconds)

    def loop_came_late(self, seconds: float) -> None:
        """Counts one look at the event loop."""
        self._loop_lag.observe(seconds)

    def refused(self, code: str) -> None:
        """Counts an error by its wire code."""
        self._refused.labels(code).inc()

    def page(self, engines: EngineCollector | None) -> bytes:
        """The text format: our own counters, then the engines'."""
        registry = CollectorRegistry()
        if engines is not None:
            registry.register(engines)
        return generate_latest(self._registry) + generate_latest(registry)


@router.get("/metrics", response_class=Response, responses=text_of_type("text/plain"))
async def metrics(request: Request) -> Response:
    """Engine figures are absent until the models are loaded; afterwards each model has its own."""
    state: ServerState = request.app.state.server
    engines = None
    if state.models is not None:
        engines = EngineCollector(state.models.services)
    return Response(state.metrics.page(engines), media_type=CONTENT_TYPE_LATEST)
