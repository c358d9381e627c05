"""Clients that stop reading: the server buffers a bounded number of bytes, and others are unaffected."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from serving import Server, long_model, serving
from sse import chunks, events
from wire import ask, read_at_random

COMPLETIONS = "/v1/completions"
HELD_MAX = 256 * 1024
N_SLOW, N_OTHERS, N_TOKENS = 8, 4, 200
RECEIVE_BYTES = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("slow")
    flags = (
        "--num-kv-cells",
        "131072",
        "--max-num-seqs",
        "16",
        "--dtype",
        "float32",
        "--send-timeout-s",
        "3600",
    )
    with serving(folder, str(long_model(folder)), *flags) as made:
        yield made


def slow_body(i: int) -> dict[str, Any]:
    return {
        "prompt": [5 + i, 6, 7],
        "max_tokens": 100_000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
        "request_id": f"slow{i}",
    }


def other_body(i: int) -> dict[str, Any]:
    return {"prompt": [50 + i, 6, 7], "max_tokens": N_TOKENS, "ignore_eos": True, "seed": i, "logprobs": 0}


def in_kernel(connection: socket.socket) -> int:
    """Return the bytes of this response in the kernel: those that have left the server and were not read."""
    mine, theirs = (f":{name[1]:04X}" for name in (connection.getsockname(), connection.getpeername()))
    n_bytes = 0
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        n_sent, n_received = (int(n, 16) for n in queues.split(":"))
        if local.endswith(mine) and remote.endswith(theirs):
            n_bytes += n_received
        elif local.endswith(theirs) and remote.endswith(mine):
            n_bytes += n_sent
    return n_bytes


def is_open_on_the_server(connection: socket.socket) -> bool:
    """Return whether the kernel still has the server's end of this connection."""
    mine, theirs = (f":{name[1]:04X}" for name in (connection.getsockname(), connection.getpeername()))
    rows = (line.split() for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:])
    return any(row[1].endswith(theirs) and row[2].endswith(mine) for row in rows)


def test_a_large_unread_response_is_dropped(tmp_path: Path) -> None:
    """The client of megabytes of prompt logprobs reads nothing: the server closes the connection.

    That frees the memory of the response.
    """
    flags = ("--num-kv-cells", "4096", "--dtype", "float32", "--send-timeout-s", "1")
    prompt = [5 + i % 200 for i in range(1000)]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20, "ignore_eos": True}
    with serving(tmp_path, str(long_model(tmp_path)), *flags) as server:
        whole = server.http.post(COMPLETIONS, json=body).content
        assert len(whole) > 3 * HELD_MAX, "the response would fit in the kernel's buffers"
        n_files = server.metric("process_open_fds")
        with ask(server, COMPLETIONS, body, receive_bytes=RECEIVE_BYTES) as idle:
            server.until("vllm:request_success_total", 2, finished_reason="length")
            server.wait_for(lambda: not is_open_on_the_server(idle))
            server.until("process_open_fds", n_files)
            assert server.metric("llaisys:kv_cells", state="used") == 0
            got = b""
            with contextlib.suppress(ConnectionResetError):
                while part := idle.recv(65536):
                    got += part
        assert 0 < len(got) < len(whole)


def test_slow_readers_are_cut_off_and_others_are_unaffected(server: Server) -> None:
    """Eight clients never read, and the engine ends their requests when their buffers are full.

    What the process then sends is what it had buffered. Four other clients get the same tokens as alone.
    """
    alone = [server.http.post(COMPLETIONS, json=other_body(i)).json()["choices"] for i in range(N_OTHERS)]
    with ExitStack() as stack, ThreadPoolExecutor(N_OTHERS) as pool:
        slow = [
            stack.enter_context(ask(server, COMPLETIONS, slow_body(i), receive_bytes=RECEIVE_BYTES))
            for i in range(N_SLOW)
        ]
        server.until("vllm:num_requests_running", N_SLOW)
        others = [
            pool.submit(read_at_random, server, COMPLETIONS, {**other_body(i), "stream": True}, i)
            for i in range(N_OTHERS)
        ]
        got = [chunks(other.result()) for other in others]
        server.until("vllm:request_success_total", N_SLOW, finished_reason="error")
        held = []
        for connection in slow:
            n_outside = in_kernel(connection)
            assert n_outside > 0
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                part = connection.recv(65536)
                assert part, raw[-200:]
                raw += part
            held.append(len(raw) - n_outside)
            check_end(raw)
    print("buffered for each client, in bytes:", held)
    assert max(held) <= HELD_MAX
    assert min(held) > HELD_MAX / 8, "the requests ended before their buffers were full"
    for whole, frames in zip(alone, got, strict=True):
        tokens = [token for frame in frames for token in frame["choices"][0]["logprobs"]["tokens"]]
        assert tokens == whole[0]["logprobs"]["tokens"]
        assert len(tokens) == N_TOKENS
    assert server.metric("llaisys:kv_cells", state="used") == 0


def check_end(raw: bytes) -> None:
    """Check that the stream ends with its only error, after all tokens."""
    body = raw.partition(b"\r\n\r\n")[2]
    payload = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        payload, body = payload + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    *frames, last, done = [event for event in events(payload) if event != "ping"]
    assert done == "[DONE]"
    assert last["error"]["code"] == "slow_reader"
    assert not any("error" in frame or frame["choices"][0]["finish_reason"] for frame in frames)
