"""Limits on what one client can cost the others: templates, bodies, slow connections, rates."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from serving import END_S, GOLDENS, Server, long_model, serving

TEMPLATE = """{% set say = messages[-1].content %}
{%- if say == 'work' %}{{ 9 ** (9 ** 9) }}{% elif say == 'load' %}{{ ('a' * 10 ** 9) | length }}
{%- else %}{{ say }}{% endif %}"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a hostile chat template."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "hostile.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(folder / "hostile.jinja"))
    flags += ("--max-body-bytes-in-flight", "200000", "--num-kv-cells", "4096")
    with serving(folder, str(GOLDENS / "qwen3-tied-bf16"), *flags) as made:
        yield made


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that allows three seconds for heads and bodies."""
    flags = ("--upload-timeout-s", "3", "--num-kv-cells", "4096")
    with serving(tmp_path_factory.mktemp("impatient"), str(GOLDENS / "qwen3-tied-bf16"), *flags) as made:
        yield made


def chat(server: Server, text: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
    return server.http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(("text", "says"), [("work", "2.0 s of CPU time"), ("load", "512 MiB of memory")])
def test_a_template_that_costs_too_much_costs_its_request(server: Server, text: str, says: str) -> None:
    want = chat(server, "Hello").json()["choices"]
    with ThreadPoolExecutor() as threads:
        doomed = threads.submit(chat, server, text)
        is_done = False
        while not is_done:  # and once after its end
            is_done = doomed.done()
            assert chat(server, "Hello").json()["choices"] == want
            assert server.http.get("/health").status_code == 200
    error = doomed.result().json()["error"]
    assert (doomed.result().status_code, error["param"]) == (400, "messages")
    assert error["message"] == f"rendering and tokenizing these messages takes more than {says}"


def test_killed_tokenizer_workers_are_replaced(server: Server) -> None:
    process = psutil.Process(server.process.pid)
    server.wait_for(lambda: len(process.children()) == 2)  # the test before has lost one
    for child in process.children():
        child.kill()
    assert chat(server, "Hello").status_code == 200


def connected(server: Server) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=END_S)


def all_of(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    return b"".join(iter(partial(connection.recv, 65536), b""))


def head(server: Server, *more: str) -> bytes:
    host = server.url.removeprefix("http://")
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_slow_head_and_a_slow_body_end(impatient: Server) -> None:
    parts = (b"", b"GET / HTTP/1.1\r\nHost: x", head(impatient, "Content-Length: 10") + b'{"p')
    with ExitStack() as stack:
        connections = []
        for part in parts:
            connections.append(stack.enter_context(connected(impatient)))
            connections[-1].sendall(part)
        *silent, reply = map(all_of, connections)
    assert silent == [b"", b""]
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 3 seconds" in reply


def send_endlessly(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 65536)


def test_a_rejected_endless_body_is_cut_off(impatient: Server) -> None:
    with connected(impatient) as connection:
        connection.sendall(head(impatient, f"Content-Length: {2**40}"))
        assert connection.recv(12) == b"HTTP/1.1 413"
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            send_endlessly(connection)


def test_too_many_or_too_long_headers_are_rejected(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(head(server, "X: " + "x" * 40_000, "Content-Length: 0"))
        assert connection.recv(12) == b"HTTP/1.1 431"


def test_a_connection_stays_usable_after_a_rejected_large_body(server: Server) -> None:
    """The client sends all of the body, reads the error, and sends another request."""
    with connected(server) as connection:
        connection.sendall(head(server, f"Content-Length: {27 * MIB}") + b"x" * (27 * MIB))
        assert connection.recv(12) == b"HTTP/1.1 413"
        connection.sendall(head(server, "Content-Length: 2", "Connection: close") + b"{}")
        assert b"HTTP/1.1 400 " in all_of(connection)


def test_bodies_together_are_bounded(server: Server) -> None:
    held = head(server, "Content-Length: 150000") + b'{"p'
    with connected(server) as first:
        first.sendall(held)
        responses: list[httpx.Response] = []

        def is_refused() -> bool:
            responses.append(server.http.post("/v1/completions", content=b"x" * 50_001))
            return responses[-1].status_code != 400

        server.wait_for(is_refused)  # once the server has read the first client's head
        assert (responses[-1].status_code, responses[-1].headers["retry-after"]) == (429, "1")
        assert responses[-1].json()["error"]["code"] == "server_overloaded"

    def is_accepted() -> bool:
        status = server.http.post("/v1/completions", content=b"x" * 50_001).status_code
        assert status in (400, 429)
        return status == 400

    server.wait_for(is_accepted)  # once the server has noticed that the first client left


def test_requests_per_key_are_limited_by_number_and_rate(tmp_path: Path) -> None:
    flags = ("--max-requests-per-minute-per-key", "3", "--num-kv-cells", "65536")
    flags += ("--max-concurrent-requests-per-key", "1", "--served-model-name", "m")
    with serving(tmp_path, str(long_model(tmp_path)), *flags, key="one,two") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0)
        long: Any = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True}}
        with client.completions.create(model="m", prompt="Hi", stream=True, **long) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="m", prompt="Hi", max_tokens=1)
            assert caught.value.code == "rate_limit_exceeded"
            other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0)
            other.completions.create(model="m", prompt="Hi", max_tokens=1)
        server.until("http_requests_total", 2, handler="/v1/completions", status="2xx")
        for _ in range(2):
            client.completions.create(model="m", prompt="Hi", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="m", prompt="Hi", max_tokens=1)
        assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(caught.value.response.headers["retry-after"]) <= 20
        assert len(client.models.list().data) == 1
