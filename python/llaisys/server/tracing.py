"""RequestTracer: sends an OpenTelemetry span for each request to a model, over OTLP/HTTP.

Used only if `otlp_traces_endpoint` is set. Names and attributes are vLLM's. A span has no prompt, completion
or key.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llaisys.config import package_version
from llaisys.errors import RejectedError
from llaisys.logs import without_credentials

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


EXPORT_TIMEOUT_S = 5
FLUSH_S = 2.0  # limit at shutdown, for an unresponsive collector
NS = 1_000_000_000

# Field of the access log -> attribute of the span.
ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "model": "gen_ai.response.model",
    "n": "gen_ai.request.n",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "completion_tokens": "gen_ai.usage.completion_tokens",
    "queued_s": "gen_ai.latency.time_in_queue",
    "first_token_s": "gen_ai.latency.time_to_first_token",
    "seconds": "gen_ai.latency.e2e",
    "end_reason": "gen_ai.response.finish_reasons",
    "path": "url.path",
    "status": "http.response.status_code",
}


class RequestTracer:
    """Owns the tracer and the thread that exports batches; recording only appends to a bounded queue."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # With `create`, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource.create({"service.name": "llaisys", "service.version": package_version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("llaisys.server", package_version())

    @staticmethod
    def to(endpoint: str) -> RequestTracer:
        """Return a tracer for a collector.

        `endpoint`: an http or https URL; the default path is `/v1/traces`.

        Raises RejectedError for an invalid URL, and for a missing package, naming what to install.
        """
        address = urlsplit(endpoint)
        if address.scheme not in ("http", "https") or not address.hostname:
            shown = without_credentials(endpoint)
            raise RejectedError(
                f"otlp_traces_endpoint is {shown!r}; spans are sent over OTLP/HTTP only; set a URL such as "
                "http://localhost:4318/v1/traces",
                param="otlp_traces_endpoint",
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as e:
            raise RejectedError(
                f"otlp_traces_endpoint needs OpenTelemetry ({e.name} is missing): "
                "pip install 'llaisys[otel]'",
                param="otlp_traces_endpoint",
            ) from e
        if address.path in ("", "/"):
            endpoint = address._replace(path="/v1/traces").geturl()
        return RequestTracer(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S))

    def record(self, headers: Mapping[str, str], fields: Mapping[str, Any]) -> None:
        """Record the span of a request that ends now, as a child of the caller's span (`traceparent`), if
        any."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end_ns = time.time_ns()
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {
                ATTRIBUTES[name]: value
                for name, value in fields.items()
                if name in ATTRIBUTES and value is not None
            },
            start_time=end_ns - int(fields["seconds"] * NS),
        )
        if fields["status"] >= 500:
            span.set_status(Status(StatusCode.ERROR, fields.get("end_reason")))
        span.end(end_ns)

    def close(self) -> None:
        """Send pending spans for up to FLUSH_S seconds, then drop the rest."""
        flush = threading.Thread(target=self._provider.shutdown, name="spans-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
