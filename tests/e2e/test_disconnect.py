"""Clients that disconnect: their requests end in every phase, streamed or not, and others are unaffected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import Server
from wire import ask, connect, head, until_read

LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], **LONG},
    "/v1/completions": {"prompt": "Hello", **LONG},
}


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_while_the_request_runs(tiny: Server, path: str, stream: bool) -> None:
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")
    with ask(tiny, path, {**BODIES[path], "stream": stream}) as connection:
        tiny.until("vllm:num_requests_running", 1)
        if stream:
            until_read(connection, b'"index":0')
    tiny.until("vllm:num_requests_running", 0)
    tiny.until("vllm:request_success_total", aborted + 1, finished_reason="abort")
    assert tiny.metric("llaisys:kv_cells", state="used") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_while_the_request_waits(tiny: Server, stream: bool) -> None:
    path = "/v1/completions"
    with ask(tiny, path, {**BODIES[path], "stream": True}) as first:
        until_read(first, b'"index":0')
        with ask(tiny, path, {**BODIES[path], "stream": stream}):
            tiny.until("vllm:num_requests_waiting", 1)
        tiny.until("vllm:num_requests_waiting", 0)
        assert tiny.metric("vllm:num_requests_running") == 1
        until_read(first, b'"index":0')
    tiny.until("vllm:num_requests_running", 0)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_during_the_prefill(tiny: Server, stream: bool) -> None:
    """The prompt takes many steps."""
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")
    generated = tiny.metric("vllm:generation_tokens_total")
    prompt = [5 + i % 500 for i in range(40_000)]
    with ask(tiny, "/v1/completions", {**LONG, "prompt": prompt, "max_tokens": 20_000, "stream": stream}):
        tiny.until("vllm:num_requests_running", 1)
    tiny.until("vllm:num_requests_running", 0)
    tiny.until("vllm:request_success_total", aborted + 1, finished_reason="abort")
    assert tiny.metric("vllm:generation_tokens_total") == generated
    assert tiny.metric("llaisys:kv_cells", state="used") == 0


def test_disconnecting_while_the_body_is_sent(tiny: Server) -> None:
    """Half of a body never reaches the engine, and counts as a client error."""
    submitted = tiny.metric("vllm:e2e_request_latency_seconds_count")
    path, raw = "/v1/completions", json.dumps(BODIES["/v1/completions"]).encode()
    n_left = tiny.metric("http_requests_total", handler=path, status="4xx")
    with connect(tiny) as connection:
        connection.sendall(head(tiny, path, len(raw)) + raw[: len(raw) // 2])
    tiny.until("http_requests_total", n_left + 1, handler=path, status="4xx")
    assert tiny.metric("vllm:e2e_request_latency_seconds_count") == submitted


def test_disconnecting_after_the_last_byte_is_no_abort(tiny: Server) -> None:
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")
    for path, body in BODIES.items():
        with ask(tiny, path, {**body, "max_tokens": 3, "stream": True}) as connection:
            until_read(connection, b"[DONE]")
    tiny.until("vllm:num_requests_running", 0)
    assert tiny.metric("vllm:request_success_total", finished_reason="abort") == aborted


def test_the_log_has_one_line_for_a_client_that_disconnects(tiny: Server) -> None:
    path, raw = "/v1/completions", json.dumps({**BODIES["/v1/completions"], "stream": True}).encode()
    with connect(tiny) as connection:
        named = head(tiny, path, len(raw)).removesuffix(b"\r\n") + b"X-Request-Id: of-a-disconnect\r\n\r\n"
        connection.sendall(named + raw)
        until_read(connection, b'"index":0')
    (line,) = tiny.lines("of-a-disconnect")
    assert (line["status"], line["end_reason"]) == (200, "client_gone")
