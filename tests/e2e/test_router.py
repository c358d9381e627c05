"""Two servers behind `vllm-router`: affinity to cached prefixes, what is run again, and a drain."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from ports import free_port
from serving import END_S, Server, long_model, serving
from sse import chunks
from waiting import block_until

N_CHATS = 20
ROUTER = str(Path(sys.executable).with_name("vllm-router"))
Chat = list[dict[str, Any]]


class Worker:
    """A server that publishes KV events. `source`: its flags of the router."""

    def __init__(self, server: Server, events: int, replay: int) -> None:
        self.server = server
        self.source = (
            *("--kv-event-source", f"{server.url}=tcp://127.0.0.1:{events}"),
            *("--kv-event-replay-source", f"{server.url}=tcp://127.0.0.1:{replay}"),
        )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            events, replay = free_port(), free_port()
            config = {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            flags = ("--num-kv-cells", "16384", "--kv-events-config", json.dumps(config))
            server = stack.enter_context(serving(tmp_path_factory.mktemp("worker"), "smollm2", *flags))
            made.append(Worker(server, events, replay))
        yield made


@contextmanager
def router(folder: Path, servers: list[Server], *flags: str) -> Iterator[httpx.Client]:
    """Start a router over the servers, and yield a client of it."""
    port = free_port()
    urls = [server.url for server in servers]
    ports = ("--port", str(port), "--prometheus-port", str(free_port()))
    command = [ROUTER, *ports, "--worker-startup-check-interval", "1", *flags, "--worker-urls", *urls]
    with (
        (folder / "router.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:

                def is_ready() -> bool:
                    assert process.poll() is None, (folder / "router.log").read_text("utf-8")
                    with suppress(httpx.TransportError):
                        return client.get("/health").status_code == 200
                    return False

                block_until(is_ready)
                yield client
        finally:
            process.kill()


def first_turns(word: str) -> list[Chat]:
    """Return chats that differ from their first token on, so that each has a prefix of its own."""
    return [
        [
            {"role": "system", "content": f"{word} {i * 7919}"},
            {"role": "user", "content": " ".join(f"item{i * 31 + j * 7}" for j in range(12))},
        ]
        for i in range(N_CHATS)
    ]


def complete(client: httpx.Client, chat: Chat) -> dict[str, Any]:
    body = {"model": "smollm2", "messages": chat, "max_tokens": 2, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def n_hits(client: httpx.Client, chats: list[Chat], answers: list[dict[str, Any]]) -> int:
    """Send the second turns, and return how many found the first turn in the cache of their server."""
    n = 0
    for chat, answer in zip(chats, answers, strict=True):
        said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        made = complete(client, [*chat, said, {"role": "user", "content": "Go on."}])
        cached = made["usage"]["prompt_tokens_details"]["cached_tokens"]
        n += cached >= answer["usage"]["prompt_tokens"] - 1
    return n


def test_kv_aware_routes_by_the_events_of_the_workers(workers: list[Worker], tmp_path: Path) -> None:
    """The router did not see the first turns, so it knows their places from the events only."""
    sources = [flag for worker in workers for flag in worker.source]
    flags = ("--policy", "kv_aware", "--kv-event-model", "smollm2", *sources)
    with router(tmp_path, [worker.server for worker in workers], *flags) as client:
        chats = first_turns("Events")
        answers = [complete(workers[i % 2].server.http, chat) for i, chat in enumerate(chats)]
        assert n_hits(client, chats, answers) >= 0.95 * N_CHATS
    log = (tmp_path / "router.log").read_text("utf-8")
    assert "decode batch" not in log


def test_cache_aware_routes_by_the_texts_that_it_has_sent(workers: list[Worker], tmp_path: Path) -> None:
    flags = ("--policy", "cache_aware", "--balance-abs-threshold", "1")
    before = [worker.server.metric("vllm:request_success_total") for worker in workers]
    with router(tmp_path, [worker.server for worker in workers], *flags) as client:
        chats = first_turns("Texts")
        with ThreadPoolExecutor(4) as pool:
            answers = [*pool.map(lambda chat: complete(client, chat), chats)]
        served = [
            worker.server.metric("vllm:request_success_total") - n
            for worker, n in zip(workers, before, strict=True)
        ]
        assert min(served) > 0
        assert n_hits(client, chats, answers) >= 0.95 * N_CHATS


@contextmanager
def tiny_servers(folder: Path, *flags: str) -> Iterator[list[Server]]:
    """Start two servers of the tiny model, which can generate for minutes."""
    model = str(long_model(folder))
    shape = ("--num-kv-cells", "65536", "--max-num-seqs", "4", "--dtype", "float32")
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            made.append(stack.enter_context(serving(folder / name, model, *shape, *flags)))
        yield made


def statuses(server: Server) -> list[int]:
    """Return the statuses of all completions that the server got, from its log."""
    lines = [json.loads(line) for line in server.log.read_text("utf-8").splitlines() if line.startswith("{")]
    return [line["status"] for line in lines if line["path"] == "/v1/completions"]


@pytest.mark.parametrize(("status", "n_runs"), [(408, 2), (499, 1)])
def test_a_router_repeats_a_timeout_only_if_it_is_a_408(tmp_path: Path, status: int, n_runs: int) -> None:
    flags = ("--request-timeout-s", "0.5", "--request-timeout-status", f"{status}")
    with (
        tiny_servers(tmp_path, *flags) as servers,
        router(tmp_path, servers, "--policy", "round_robin", "--retry-max-retries", "2") as client,
    ):
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 60_000, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == "request_timeout"
        for server in servers:
            server.wait_idle()
        late = [server.metric("llaisys:rejected_total", reason="request_timeout") for server in servers]
        assert sum(late) == n_runs


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_a_drain_behind_a_router_loses_no_request_and_runs_none_twice(tmp_path: Path, policy: str) -> None:
    """One server gets SIGTERM while it streams: it ends its streams, and the other one gets the rest.

    The circuit of the draining server opens before a request has used up its attempts.
    """
    flags = ("--policy", policy, "--balance-abs-threshold", "1", "--cb-failure-threshold", "2")
    n_clients, n_each = 4, 12
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        tiny_servers(tmp_path, "--shutdown-timeout", "250") as servers,
        router(tmp_path, servers, *flags) as client,
        ThreadPoolExecutor(n_clients) as pool,
    ):

        def stream(_: int) -> list[dict[str, Any]]:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return chunks(answer.content)

        answers = [pool.submit(stream, i) for i in range(n_clients * n_each)]
        leaving, staying = servers
        leaving.wait_for(lambda: leaving.metric("vllm:num_requests_running") >= 2)
        assert leaving.stop(signal.SIGTERM) == 0
        for answer in answers:
            found = answer.result(timeout=END_S)
            ends = [chunk for chunk in found if "error" in chunk or chunk["choices"][0]["finish_reason"]]
            assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"]
            assert len(found) > 1
        staying.wait_idle()
        served = [statuses(server).count(200) for server in servers]
    assert sum(served) == n_clients * n_each
    assert min(served) >= 2
