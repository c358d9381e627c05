"""A server with API keys: access, and each key's share of the capacity."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from serving import COMMAND, END_S, GOLDENS, Server, environment, long_model, serving
from wire import connect, head


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("locked")
    flags = ("--served-model-name", "first", "--served-model-name", "second", "--strict-fields")
    with serving(folder, str(GOLDENS / "qwen3-tied-bf16"), *flags, key="secret-1,secret-2") as server:
        yield server


def test_every_key_is_accepted_and_no_other(locked: Server) -> None:
    for key in ("secret-1", "secret-2"):
        client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key)
        response = client.completions.create(model="second", prompt="Hello", max_tokens=2)
        assert response.model == "second"
        assert [card.id for card in client.models.list()] == ["first", "second"]
    without_key = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="EMPTY", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        without_key.completions.create(model="first", prompt="Hello")
    assert caught.value.code == "invalid_api_key"


def test_strict_fields_reject_an_unknown_field(locked: Server) -> None:
    body = {"prompt": "Hello", "frobnicate": 1}
    response = locked.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "frobnicate")


def test_the_log_has_no_keys(locked: Server) -> None:
    locked.http.get("/v1/models?key=secret-1", headers={"authorization": "Bearer secret-1x"})
    assert "secret-" not in locked.log.read_text("utf-8")


# --- no key can use the shares of the others ---

LONG = {"prompt": [5, 6, 7], "max_tokens": 16_000, "ignore_eos": True, "stream": True}
OTHER = {"authorization": "Bearer two"}
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve two keys: `one` uses all that it can get, and `two` asks for one token."""
    folder = tmp_path_factory.mktemp("shared")
    flags = ("--num-kv-cells", "262144", "--max-num-seqs", "8", "--max-num-queued-reqs", "16")
    flags += ("--max-sessions", "8", "--max-body-bytes-in-flight", str(16 * MIB), "--dtype", "float32")
    with serving(folder, str(long_model(folder)), *flags, key="one,two") as server:
        yield server


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request of key `one`, and leave the response unread in the socket."""
    raw = json.dumps(body).encode()
    connection = connect(server)
    connection.sendall(keyed(head(server, path, len(raw))) + raw)
    return connection


def keyed(raw: bytes) -> bytes:
    return raw.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer one\r\n\r\n")


def status_of(connection: socket.socket) -> int:
    with connection.makefile("rb") as file:
        return int(file.readline().split()[1])


def one_token(server: Server) -> httpx.Response:
    """Send a request of key `two`."""
    body = {"prompt": [9, 8, 7], "max_tokens": 1, "ignore_eos": True}
    return server.http.post(COMPLETIONS, json=body, headers=OTHER)


def test_sequence_ids_are_shared(shared: Server) -> None:
    """While eight requests with eight choices run, a request of the other key gets a sequence id."""
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(send(shared, COMPLETIONS, {**LONG, "n": 8}))
        shared.until("vllm:num_requests_running", 8)
        before = shared.metric("vllm:num_preemptions_total")
        response = one_token(shared)
        assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 1)
        assert shared.metric("vllm:num_preemptions_total") == before + 1
        assert shared.metric("vllm:request_success_total", finished_reason="length") >= 1
    shared.wait_idle()


def test_the_queue_is_shared(shared: Server) -> None:
    """A key with too many waiting requests and embedding inputs gets 429; the other key does not."""
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(send(shared, COMPLETIONS, LONG))
        shared.until("vllm:num_requests_running", 8)
        shared.until("vllm:num_requests_waiting", 12)  # of 16
        more = [(EMBEDDINGS, {"input": [[5, 6, 7]] * 64}), (COMPLETIONS, LONG)] * 3
        rejected = [stack.enter_context(send(shared, path, body)) for path, body in more]
        assert {status_of(connection) for connection in rejected} == {429}
        assert one_token(shared).status_code == 200
        embedded = shared.http.post(EMBEDDINGS, json={"input": [[5, 6]]}, headers=OTHER)
        assert embedded.status_code == 200
    shared.wait_idle()


def test_upload_bytes_are_shared(shared: Server) -> None:
    """Bodies that are declared and not sent count."""
    with ExitStack() as stack:
        heads = [stack.enter_context(connect(shared)) for _ in range(16)]
        for connection in heads:
            connection.sendall(keyed(head(shared, COMPLETIONS, 4 * MIB)))
        assert [status_of(connection) for connection in heads[-4:]] == [429] * 4
        assert one_token(shared).status_code == 200
        large = {"prompt": [9, 8, 7], "max_tokens": 1, "user": "x" * (4 * MIB - 100)}
        assert shared.http.post(COMPLETIONS, json=large, headers=OTHER).status_code == 200
    # The server notices that the connections are closed.
    shared.wait_for(lambda: shared.http.post("/tokenize", json={"prompt": "x"}).status_code != 429)


def test_sessions_are_shared(shared: Server) -> None:
    names = [f"s{i}" for i in range(8)]
    statuses = [shared.http.post("/v1/sessions", json={"session_id": name}).status_code for name in names]
    assert statuses == [200] * 6 + [429] * 2
    for name in names[:2]:
        made = shared.http.post("/v1/sessions", json={"session_id": name}, headers=OTHER)
        assert made.status_code == 200


def test_a_key_has_no_access_to_prompts_and_ids_of_another(shared: Server) -> None:
    body = {"prompt": [*range(40, 75)], "max_tokens": 1, "request_id": "mine"}

    def cached(headers: dict[str, str]) -> int:
        usage = shared.http.post(COMPLETIONS, json=body, headers=headers).json()["usage"]
        n: int = usage["prompt_tokens_details"]["cached_tokens"]
        return n

    assert [cached({}), cached({})] == [0, 34]
    assert [cached(OTHER), cached(OTHER)] == [0, 34]
    with send(shared, COMPLETIONS, {**LONG, "request_id": "open"}) as connection:
        assert status_of(connection) == 200
        again = {"prompt": [5], "max_tokens": 1, "request_id": "open"}
        assert shared.http.post(COMPLETIONS, json=again).status_code == 400
        response = shared.http.post(COMPLETIONS, json=again, headers=OTHER)
        assert (response.status_code, response.json()["id"]) == (200, "cmpl-open")
        (choice,) = shared.http.get("/v1/requests/cmpl-open/timeline").json()["choices"]
        assert not choice["is_over"]
    shared.wait_idle()


def test_an_empty_key_prevents_the_start() -> None:
    command = [*COMMAND, "serve", str(GOLDENS / "qwen3-tied-bf16"), "--port", "0", "--api-key", ""]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=END_S, check=False
    )
    assert done.returncode not in (0, 70)
    assert "shell variable" in done.stderr
    assert "Traceback" not in done.stderr
