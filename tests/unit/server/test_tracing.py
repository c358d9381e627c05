"""OpenTelemetry traces: the spans that a collector receives over HTTP, and configuration errors."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fakes.service import FakeService, Piece
from llaisys.errors import EngineDeadError, RejectedError
from llaisys.server import tracing
from llaisys.server.state import ServerState
from llaisys.server.tracing import RequestTracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP collector that records its requests as (path, request)."""

    def __init__(self) -> None:
        self.got: list[tuple[str, ExportTraceServiceRequest]] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                got.append((self.path, ExportTraceServiceRequest.FromString(raw)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Span]:
        return [
            span
            for _, request in self.got
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_the_span_of_a_request_has_the_callers_span_as_parent(
    collector: Collector, state: ServerState, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    with closing(RequestTracer.to(collector.url)) as state.tracer:
        async with make_client(
            state, traceparent=f"00-{TRACE}-{PARENT}-01", **{"x-request-id": "r1"}
        ) as client:
            body = {"prompt": "canary", "max_tokens": 5, "temperature": 0.5, "top_p": 0.25}
            await client.post("/v1/completions", json=body)
            await client.get("/v1/models")
    assert [path for path, _ in collector.got] == ["/v1/traces"]
    (span,) = collector.spans()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    found = attributes(span)
    times = [found.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert times == sorted(times)
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(times[-1] * 1e9, abs=1e4)
    assert found == {
        "gen_ai.request.id": "r1",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.usage.prompt_tokens": 6,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.response.finish_reasons": "stop",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
    }
    (resource,) = [each.resource for each in collector.got[0][1].resource_spans]
    assert {each.key: each.value.string_value for each in resource.attributes}["service.name"] == "llaisys"
    assert b"canary" not in collector.got[0][1].SerializeToString()


async def test_a_failed_request_is_a_failed_span(
    collector: Collector,
    state: ServerState,
    engine: FakeService,
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    engine.script = [Piece(["a"]), EngineDeadError("gone")]
    with closing(RequestTracer.to(f"{collector.url}/custom")) as state.tracer:
        async with make_client(state) as client:
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
    assert [path for path, _ in collector.got] == ["/custom"]
    (span,) = collector.spans()
    assert (span.status.code, span.status.message) == (2, "engine_dead")
    assert span.parent_span_id == b""


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4317", "http://", "ftp://x/v1"])
def test_an_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(RejectedError, match=r"OTLP/HTTP only; set a URL such as http://") as rejected:
        RequestTracer.to(endpoint)
    assert rejected.value.param == "otlp_traces_endpoint"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RejectedError, match=r"pip install 'llaisys\[otel\]'"):
        RequestTracer.to("http://localhost:4318")


async def test_an_unresponsive_collector_delays_no_request(
    monkeypatch: pytest.MonkeyPatch, state: ServerState, make_client: Callable[..., httpx.AsyncClient]
) -> None:
    """The collector accepts the connection and never responds; shutdown waits at most FLUSH_S for it."""
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    monkeypatch.setattr(tracing, "EXPORT_TIMEOUT_S", 600)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        state.tracer = RequestTracer.to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with make_client(state) as client:
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        state.tracer.close()
