"""Clients that go away: their requests end, in both modes and in every phase, and others do not notice."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from serving import Server

LONG = {"temperature": 0, "max_tokens": 60_000, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], **LONG},
    "/v1/completions": {"prompt": "Hello", **LONG},
}


def ask(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the answer in the socket."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


def until_read(connection: socket.socket, text: bytes) -> None:
    seen = b""
    while text not in seen:
        part = connection.recv(65536)
        assert part, seen
        seen += part


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_it_runs(tiny: Server, path: str, stream: bool) -> None:
    aborted = tiny.metric("vllm:request_success_total", finished_reason="abort")
    with ask(tiny, path, {**BODIES[path], "stream": stream}) as connection:
        tiny.until("vllm:num_requests_running", 1)
        if stream:
            until_read(connection, b'"index":0')
    tiny.until("vllm:num_requests_running", 0)
    tiny.until("vllm:request_success_total", aborted + 1, finished_reason="abort")
    assert tiny.metric("llaisys:kv_cells", state="used") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_it_waits(tiny: Server, stream: bool) -> None:
    path = "/v1/completions"
    with ask(tiny, path, {**BODIES[path], "stream": True}) as first:
        until_read(first, b'"index":0')
        with ask(tiny, path, {**BODIES[path], "stream": stream}):
            tiny.until("vllm:num_requests_waiting", 1)
        tiny.until("vllm:num_requests_waiting", 0)
        assert tiny.metric("vllm:num_requests_running") == 1
        until_read(first, b'"index":0')
    tiny.until("vllm:num_requests_running", 0)


def test_the_log_has_one_line_for_it(tiny: Server) -> None:
    with ask(tiny, "/v1/completions", {**BODIES["/v1/completions"], "stream": True}) as connection:
        until_read(connection, b"x-request-id: ")
        until_read(connection, b'"index":0')
    tiny.until("vllm:num_requests_running", 0)
    last = [line for line in tiny.log.read_text("utf-8").splitlines() if "llaisys.server" in line][-1]
    assert "outcome=client_gone" in last
