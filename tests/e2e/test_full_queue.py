"""Rejections before the body is read: a full queue, and bodies that exceed their budget."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from serving import long_model, serving
from wire import ask, connect, head

COMPLETIONS = "/v1/completions"
BUDGET = 10_000


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Read a response to its end; return its status, headers and JSON."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, json.loads(file.read(int(headers["content-length"])))


def test_a_full_queue_is_reported_before_the_body(tmp_path: Path) -> None:
    """While one request runs and one waits, a head alone gets a 429.

    When both have ended, a request on the same connection gets a 200.
    """
    flags = ("--num-kv-cells", "16384", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    budget = ("--max-body-bytes-in-flight", str(BUDGET))
    body = {"prompt": [5, 6, 7], "max_tokens": 16_000, "ignore_eos": True, "stream": True}
    short = json.dumps({**body, "max_tokens": 1, "stream": False}).encode()
    with (
        serving(tmp_path, str(long_model(tmp_path)), "--dtype", "float32", *flags, *budget) as server,
        ExitStack() as stack,
    ):
        stack.enter_context(running := ask(server, COMPLETIONS, body))
        server.until("vllm:num_requests_running", 1)
        stack.enter_context(waiting := ask(server, COMPLETIONS, body))
        server.until("vllm:num_requests_waiting", 1)
        rejected = stack.enter_context(connect(server))
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/embeddings"):
            with connect(server) as other:
                other.sendall(head(server, path, 1000))
                status, headers, error = answer_of(other)
            assert (status, error["error"]["code"]) == (429, "server_overloaded")
            assert error["error"]["type"] == "rate_limit_error"
            assert int(headers["retry-after"]) >= 1
        rejected.sendall(head(server, COMPLETIONS, len(short)))
        assert answer_of(rejected)[0] == 429
        running.close()
        waiting.close()
        server.wait_idle()
        rejected.sendall(short)  # the refused request's body, which is dropped
        rejected.sendall(head(server, COMPLETIONS, len(short)) + short)
        status, _, response = answer_of(rejected)
        assert (status, response["usage"]["completion_tokens"]) == (200, 1)
        with connect(server) as other:
            other.sendall(head(server, COMPLETIONS, BUDGET + 1))
            status, headers, error = answer_of(other)
        assert (status, error["error"]["code"]) == (429, "server_overloaded")
        assert int(headers["retry-after"]) >= 1
