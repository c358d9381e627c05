"""Start and shutdown: errors that say what to do, and signals that end every stream properly."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from serving import COMMAND, END_S, GOLDENS, Server, environment, long_model, serving
from sse import events

MODEL = str(GOLDENS / "qwen2-tied-bf16")
# Two of these fit into the cells at the same time.
LONG = {"prompt": "Hello", "max_tokens": 30_000, "ignore_eos": True}
FLAGS = ("--num-kv-cells", "65536", "--max-num-seqs", "2", "--dtype", "float32")


def rejected(*arguments: str, **env: str) -> str:
    """Return the error of a start that fails with exit code 1 and without a traceback."""
    done = subprocess.run(
        [*COMMAND, "serve", *arguments], capture_output=True, text=True, env=environment(**env), timeout=END_S
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_taken_port_is_reported_with_the_flag_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = rejected(MODEL, "--port", port)
    assert f"port {port} of 127.0.0.1 is taken" in message
    assert "--port" in message


def test_an_exposed_server_needs_a_key() -> None:
    message = rejected(MODEL, "--host", "0.0.0.0", "--port", "0")
    assert "0.0.0.0" in message
    assert "LLAISYS_API_KEY" in message


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    assert "nothing-here" in rejected(str(tmp_path / "nothing-here"), "--port", "0")


def test_an_invalid_setting_is_named(tmp_path: Path) -> None:
    assert "max_num_seqs" in rejected(MODEL, LLAISYS_MAX_NUM_SEQS="none")
    (tmp_path / "config.yaml").write_text("max_num_sqs: 3\n")
    assert "max_num_sqs" in rejected(MODEL, "--config", str(tmp_path / "config.yaml"))


class Reader(Thread):
    """Reads one response to its end on its own thread."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__()
        self.response = httpx.Response(599)
        self.raw = b""
        self.has_begun = Event()
        self._server = server
        self._body = body

    def run(self) -> None:
        with self._server.http.stream("POST", "/v1/completions", json=self._body) as self.response:
            for part in self.response.iter_raw():
                self.raw += part
                self.has_begun.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_request_properly(tmp_path: Path, number: int) -> None:
    """A running stream gets an error frame and `[DONE]`; the other requests get a 503."""
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS, "--shutdown-timeout", "0") as server:
        readers = [Reader(server, {**LONG, "stream": stream}) for stream in (True, False, True, False)]
        for n_open, reader in enumerate(readers, start=1):
            reader.start()
            server.until("vllm:num_requests_running", min(n_open, 2))
            server.until("vllm:num_requests_waiting", max(n_open - 2, 0))
        assert server.stop(number) == 0
        for reader in readers:
            reader.join()
    running_stream, running, waiting_stream, waiting = readers
    found = events(running_stream.raw)
    assert found.count("[DONE]") == 1
    assert found[-1] == "[DONE]"
    assert found[-2]["error"]["code"] == "shutting_down"
    for reader in (running, waiting, waiting_stream):
        assert reader.response.status_code == 503
        assert b"shutting_down" in reader.raw


def test_a_drain_lets_requests_finish(tmp_path: Path) -> None:
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS, "--shutdown-timeout", "250") as server:
        reader = Reader(server, {**LONG, "max_tokens": 500, "stream": True})
        reader.start()
        reader.has_begun.wait()
        server.process.send_signal(signal.SIGTERM)
        reader.join()
        assert server.process.wait(timeout=END_S) == 0
    *_, last, done = events(reader.raw)
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "length"


def test_a_second_signal_cuts_the_drain(tmp_path: Path) -> None:
    with serving(tmp_path, str(long_model(tmp_path)), *FLAGS, "--shutdown-timeout", "250") as server:
        reader = Reader(server, {**LONG, "stream": True})
        reader.start()
        server.until("vllm:num_requests_running", 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/livez").status_code == 200
        refused_now = server.http.post("/v1/completions", json={"prompt": "Hello"})
        assert refused_now.json()["error"]["code"] == "shutting_down"
        assert server.stop(signal.SIGINT) == 0
        reader.join()
    assert events(reader.raw)[-2]["error"]["code"] == "shutting_down"
