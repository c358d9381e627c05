"""Many idle connections, Unix sockets and TLS; the bytes of a stream and the log line of a request."""

from __future__ import annotations

import fcntl
import json
import re
import resource
import signal
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import trustme

from serving import COMMAND, END_S, GOLDENS, READY, Server, environment, serving
from wire import connect

MODEL = str(GOLDENS / "qwen2-tied-bf16")
FLAGS = ("--num-kv-cells", "2048", "--dtype", "float32")
N_IDLE = 1_000
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with the usual limit of 1,024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        started = serving(
            tmp_path_factory.mktemp("idle"), MODEL, *FLAGS, "--timeout-keep-alive", "600", key="good"
        )
        made = started.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    try:
        yield made
    finally:
        started.__exit__(None, None, None)


def exchange(connection: socket.socket) -> bytes:
    """Send one more request on an open connection; return the status line."""
    connection.sendall(GET)
    raw = b""
    while not raw.endswith(b"}"):
        part = connection.recv(4096)
        assert part, raw
        raw += part
    return raw.split(b"\r\n")[0]


def test_a_thousand_idle_connections_stay_open(server: Server) -> None:
    """Each gets a response at first and one later; in between another client is served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * N_IDLE)), hard))
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(N_IDLE)]
        assert {exchange(connection) for connection in idle} == {b"HTTP/1.1 200 OK"}
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        assert server.metric("process_open_fds") > N_IDLE
        assert {exchange(connection) for connection in idle} == {b"HTTP/1.1 200 OK"}


def test_idle_connections_above_the_limit_lock_out_no_client(server: Server) -> None:
    """With more connections than the server may have open, probes and clients get responses.

    The log stays short, and a connection that was served before stays open.
    """
    n_connections = 1_400
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    n_bytes = server.log.stat().st_size
    with ExitStack() as stack:
        served = stack.enter_context(connect(server))
        assert exchange(served) == b"HTTP/1.1 200 OK"
        for _ in range(n_connections):
            stack.enter_context(connect(server))
        with connect(server) as probe:
            assert exchange(probe) == b"HTTP/1.1 200 OK"
        assert exchange(served) == b"HTTP/1.1 200 OK"
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        assert server.metric("process_open_fds") < 1_056 + 256
    assert server.log.stat().st_size - n_bytes < 4096


def test_a_reader_of_stderr_that_stops_does_not_stop_the_server() -> None:
    """Requests write far more lines than the pipe holds, and SIGTERM still ends the server."""
    command = [*COMMAND, "serve", MODEL, "--port", "0", *FLAGS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            ready = READY.match(process.stdout.readline().decode())
            assert ready is not None
            with httpx.Client(base_url=ready[2], timeout=None) as client:
                for _ in range(200):
                    assert client.get("/no-such-path").status_code == 404
                assert "llaisys:log_lines_dropped_total 0.0" in client.get("/metrics").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=END_S) == 0
        finally:
            process.kill()


def test_a_stream_consists_of_known_frames_and_ends_with_done(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 2, "stream": True}
    chat["stream_options"] = {"include_usage": True}
    with server.http.stream("POST", "/v1/chat/completions", json=chat) as response:
        raw = b"".join(response.iter_raw())
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = re.findall(rb"data: (\{.*?\}|\[DONE\])\n\n", raw)
    assert b"".join(b"data: " + frame + b"\n\n" for frame in frames) == raw
    *parts, done = frames
    assert done == b"[DONE]"
    assert b"[DONE]" not in b"".join(parts)
    first, *middle, end, usage = map(json.loads, parts)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(part["choices"][0]["delta"].keys() == {"content"} for part in middle)
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2)


def test_a_request_has_one_log_line_without_key_and_prompt(server: Server) -> None:
    """It is one line of JSON that identifies the key. The log has neither the key nor the prompt."""
    headers = {"x-request-id": "of-the-log"}
    response = server.http.post("/v1/completions", json={**BODY, "prompt": "canary"}, headers=headers)
    assert response.headers["x-request-id"] == "of-the-log"
    (line,) = server.lines("of-the-log")
    text = server.log.read_text("utf-8")
    assert (line["status"], line["end_reason"], line["completion_tokens"]) == (200, "length", 3)
    assert line["model"] == server.model
    assert line["key"] not in ("", "good")
    assert "canary" not in text
    assert "Bearer" not in text


def test_a_unix_socket_serves_its_owner_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "llaisys.sock"
    with serving(tmp_path, MODEL, *FLAGS, "--uds", str(path), "--host", "0.0.0.0") as server:
        assert server.url == f"unix:{path}"
        assert not stat.S_IMODE(path.stat().st_mode) & 0o007
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=None) as client:
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 3
            assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
        assert server.stop() == 0
    assert not path.exists()


def test_tls_with_client_certificates(tmp_path: Path) -> None:
    """Only a client with a certificate of the authority can connect."""
    authority = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca", "client")}
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(files["cert"])
    issued.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    authority.issue_cert("client@example").private_key_and_cert_chain_pem.write_to_path(files["client"])
    tls = ("--ssl-certfile", str(files["cert"]), "--ssl-keyfile", str(files["key"]))
    with serving(
        tmp_path, MODEL, *FLAGS, *tls, "--ssl-ca-certs", str(files["ca"]), "--ssl-cert-reqs", "2"
    ) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(files["ca"]))
        with (
            httpx.Client(base_url=server.url, verify=context, timeout=None) as without_certificate,
            pytest.raises(httpx.TransportError),
        ):
            without_certificate.get("/livez")
        context.load_cert_chain(files["client"])
        with (
            httpx.Client(base_url=server.url, verify=context, timeout=None) as client,
            client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response,
        ):
            assert b"".join(response.iter_raw()).endswith(b"data: [DONE]\n\n")
        assert server.stop() == 0
