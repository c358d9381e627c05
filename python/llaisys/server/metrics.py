"""GET /metrics: vLLM's names, labels and buckets, so that its dashboards work, and `llaisys:...` metrics.

Nothing is counted twice. Engine stats are read from AsyncLLM's snapshot at each scrape. Only rejections and
HTTP responses are counted here, because the engine never sees them. vLLM's metrics of LoRA, sleep
and corrupted logits are absent, because LLAISYS does not have these features.
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

from llaisys.outputs import FinishReason
from llaisys.server.http_errors import TABLE
from llaisys.server.response_schemas import text_of_type
from llaisys.stats import HistogramData, ServiceStats

if TYPE_CHECKING:
    from llaisys.async_llm import AsyncLLM
    from llaisys.logs import LineWriter
    from llaisys.server.listener import ConnectionStats
    from llaisys.server.state import ServerState


LABELS = ("model_name", "engine")
# vLLM counts blocks of several tokens; a cell here is a block of one.
CACHE_CONFIG_LABELS = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "cache_dtype")
# The buckets of the instrumentator that vLLM uses for HTTP.
HTTP_BOUNDS_S = (0.1, 0.5, 1.0)
# The error code of a stream whose client read nothing for `send_timeout_s`. It is only logged and counted.
SEND_TIMEOUT = "send_timeout"
LAG_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

_Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily

router = APIRouter()
# No `_created` series for each counter, as in vLLM.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types


def _usage(stats: ServiceStats) -> float:
    return stats.engine.kv_cells_used / stats.engine.kv_cells if stats.engine.kv_cells else 0.0


def _cells(stats: ServiceStats) -> dict[str, int]:
    """Return the number of cells by state. `used` includes pins of sessions; `cached` can be evicted."""
    used, free = stats.engine.kv_cells_used, stats.engine.kv_cells_free
    return {"used": used, "cached": stats.engine.kv_cells - used - free, "free": free}


def _states(stats: ServiceStats) -> dict[str, int]:
    """Return the number of recurrent states of the prefix cache, by state."""
    cached = stats.engine.recurrent_states_cached
    return {"cached": cached, "free": stats.engine.recurrent_states_max - cached}


def _finished(stats: ServiceStats) -> dict[str, int]:
    """Return the count of every reason, including 0, so that rates exist before its first occurrence."""
    return {reason.value: stats.finished.get(reason.value, 0) for reason in FinishReason}


# (name, help, value of a ServiceStats); counters are exposed with `_total`.
GAUGES: tuple[tuple[str, str, Callable[[ServiceStats], float]], ...] = (
    ("vllm:num_requests_running", "Choices in the running batch.", lambda s: s.engine.num_running),
    ("vllm:num_requests_waiting", "Choices waiting to run.", lambda s: s.engine.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV cells used by running requests or pinned by sessions, 0 to 1.",
        _usage,
    ),
    ("llaisys:seq_ids_free", "Sequence ids not in use.", lambda s: s.engine.seq_ids_free),
    (
        "llaisys:kv_cells_retained",
        "KV cells in the prefix cache, in use or not.",
        lambda s: s.engine.kv_cells_retained,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[ServiceStats], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("vllm:num_preemptions", "Preemptions of running requests.", lambda s: s.engine.num_preempted),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.engine.prefix_query_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda s: s.engine.prefix_hit_tokens,
    ),
    (
        "vllm:external_prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache's disk tier.",
        lambda s: s.engine.external_query_tokens,
    ),
    (
        "vllm:external_prefix_cache_hits",
        "Prompt tokens loaded from the prefix cache's disk tier.",
        lambda s: s.engine.external_hit_tokens,
    ),
    (
        "llaisys:kv_cells_evicted",
        "KV cells evicted from the prefix cache.",
        lambda s: s.engine.num_evicted_cells,
    ),
    (
        "llaisys:invariant_violations",
        "Violated invariants of an engine, which are bugs.",
        lambda s: s.invariant_violations,
    ),
    ("llaisys:steps", "Steps of the engine.", lambda s: s.engine.num_steps),
    (
        "vllm:spec_decode_num_drafts",
        "Drafts that a step verified, one per request and step.",
        lambda s: s.engine.spec_decode_num_drafts,
    ),
    (
        "vllm:spec_decode_num_draft_tokens",
        "Draft tokens that a step verified.",
        lambda s: s.engine.spec_decode_num_draft_tokens,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that became output.",
        lambda s: s.engine.spec_decode_num_accepted_tokens,
    ),
)


def _accepted_by_position(stats: ServiceStats) -> dict[str, int]:
    """Return the accepted draft tokens by their position in the draft, from 0."""
    counts = stats.engine.spec_decode_num_accepted_tokens_per_pos
    return {str(position): n for position, n in enumerate(counts)}


# Metrics with one more label, and a number for each value of the label.
BY_LABEL: tuple[tuple[type[_Family], str, str, str, Callable[[ServiceStats], Mapping[str, float]]], ...] = (
    (
        GaugeMetricFamily,
        "vllm:num_requests_waiting_by_reason",
        "Waiting choices, by reason.",
        "reason",
        lambda s: s.engine.waiting_by_reason,
    ),
    (
        CounterMetricFamily,
        "vllm:request_success",
        "Requests that ended, by finish reason.",
        "finished_reason",
        _finished,
    ),
    (
        CounterMetricFamily,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that became output, by position in the draft.",
        "position",
        _accepted_by_position,
    ),
    (GaugeMetricFamily, "llaisys:kv_cells", "KV cells (one token each), by state.", "state", _cells),
    (
        GaugeMetricFamily,
        "llaisys:recurrent_states",
        "Recurrent states that the prefix cache can keep, by state; 0 for a model without recurrent layers.",
        "state",
        _states,
    ),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[ServiceStats], HistogramData]], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "Seconds from arrival to first token.",
        lambda s: s.time_to_first_token_s,
    ),
    (
        "vllm:inter_token_latency_seconds",
        "Seconds between tokens of a completion.",
        lambda s: s.inter_token_latency_s,
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean seconds per token of a completion, after its first.",
        lambda s: s.time_per_output_token_s,
    ),
    (
        "vllm:e2e_request_latency_seconds",
        "Seconds from arrival to the end.",
        lambda s: s.e2e_request_latency_s,
    ),
    ("vllm:request_queue_time_seconds", "Seconds from arrival to first admission.", lambda s: s.queue_time_s),
    (
        "vllm:request_prefill_time_seconds",
        "Seconds from first admission to first token.",
        lambda s: s.prefill_time_s,
    ),
    ("vllm:request_decode_time_seconds", "Seconds from first to last token.", lambda s: s.decode_time_s),
    (
        "vllm:request_inference_time_seconds",
        "Seconds from first admission to last token.",
        lambda s: s.inference_time_s,
    ),
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
        "Seconds from a cancellation until all resources are free.",
        lambda s: s.engine.seconds_of_cancels,
    ),
)


class EngineCollector:
    """Converts the current stats of the models to metric families."""

    def __init__(self, services: Sequence[AsyncLLM]) -> None:
        self._services = services
        self._snapshots = [((each.model_names[0], "0"), each.stats()) for each in services]

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families (prometheus_client's collector protocol)."""
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
            "llaisys:step_seconds", "Seconds of one step, by phase.", labels=(*LABELS, "phase")
        )
        for labels, stats in self._snapshots:
            for phase, data in stats.engine.seconds_of_phases.items():
                _observed(phases, (*labels, phase), data)
        yield phases

    def _cache_config(self) -> Metric:
        """Return cache settings as labels of a constant 1."""
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV cache settings of a model, as labels.",
            labels=(*LABELS, *CACHE_CONFIG_LABELS),
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
    """Converts the counters of connections and of the log to metric families."""

    def __init__(self, stats: ConnectionStats, log: LineWriter) -> None:
        self._stats = stats
        self._log = log

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families (prometheus_client's collector protocol)."""
        stats = self._stats
        closed = CounterMetricFamily(
            "llaisys:connections_closed",
            "Connections closed by a limit: at accept, while idle, or for a bad request.",
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
            (
                "llaisys:requests_refused",
                "Requests rejected because too many were open.",
                stats.requests_refused,
            ),
            ("llaisys:parser_headers", "Request headers parsed.", stats.headers),
            ("llaisys:parser_events", "Events of the HTTP parser; a request counts as 64.", stats.events),
            (
                "llaisys:log_lines_dropped",
                "Log lines dropped because stderr was not read.",
                self._log.n_dropped,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)


def _observed(family: HistogramMetricFamily, labels: Sequence[str], data: HistogramData) -> None:
    family.add_metric(labels, buckets=list(cumulative(data)), sum_value=data.sum)


def cumulative(data: HistogramData) -> Iterator[tuple[str, float]]:
    """Yield `(upper bound, cumulative count)` for the text format; the last bound is `+Inf`."""
    total = 0
    for bound, count in zip((*map(str, data.bounds), "+Inf"), data.counts, strict=True):
        total += count
        yield bound, total


class Metrics:
    """The server's own counters, and the text of all metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._responses = Counter(
            "http_requests", "HTTP responses.", ("handler", "method", "status"), registry=self._registry
        )
        self._response_s = Histogram(
            "http_request_duration_seconds",
            "Seconds from an HTTP request to the end of its response.",
            ("handler", "method"),
            buckets=HTTP_BOUNDS_S,
            registry=self._registry,
        )
        self._errors = Counter(
            "llaisys:rejected",
            "Requests rejected or failed, by error code.",
            ("reason",),
            registry=self._registry,
        )
        self._loop_lag = Histogram(
            "llaisys:event_loop_lag_seconds",
            "Delay of the event loop in seconds, sampled four times per second.",
            buckets=LAG_BOUNDS_S,
            registry=self._registry,
        )
        # Create the series now, so that rates exist before the first occurrence.
        for code in (SEND_TIMEOUT, *(row.code for row in TABLE.values())):
            self._errors.labels(code)

    def count_connections(self, stats: ConnectionStats, log: LineWriter) -> None:
        """Add the counters of connections and of the log."""
        self._registry.register(ConnectionCollector(stats, log))

    def count_response(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP response by status class (`2xx`). `route`: a route's path, never client input."""
        self._responses.labels(route, method, f"{status // 100}xx").inc()
        self._response_s.labels(route, method).observe(seconds)

    def observe_loop_lag(self, seconds: float) -> None:
        """Count one delay of the event loop."""
        self._loop_lag.observe(seconds)

    def count_error(self, code: str) -> None:
        """Count an error by its code."""
        self._errors.labels(code).inc()

    def render(self, engines: EngineCollector | None) -> bytes:
        """Return the text format: the server's counters, then the engines'."""
        registry = CollectorRegistry()
        if engines is not None:
            registry.register(engines)
        return generate_latest(self._registry) + generate_latest(registry)


@router.get("/metrics", response_class=Response, responses=text_of_type("text/plain"))
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format. Those of a model are present once it is loaded."""
    state: ServerState = request.app.state.server
    engines = None
    if state.models is not None:
        engines = EngineCollector(state.models.services)
    return Response(state.metrics.render(engines), media_type=CONTENT_TYPE_LATEST)
