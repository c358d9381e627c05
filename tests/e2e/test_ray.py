"""Two replicas on Ray Serve: affinity, cancellation, and streams while replicas die and are replaced."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ray_cluster import Cluster, ray_cluster
from serving import END_S, long_model
from sse import chunks
from waiting import block_until

pytestmark = [pytest.mark.two_cpus, pytest.mark.timeout(600)]  # half a minute on two quiet cores

URL = "/v1/chat/completions"
REPLICA = "x-llaisys-replica"
N_CHATS, N_CLIENTS, N_CONVERSATIONS = 200, 8, 16
N_LONG = 1500
Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    arguments = {
        "model": str(long_model(folder)),
        "served_model_name": "tiny",
        "dtype": "float32",
        "num_kv_cells": 16384,
        "max_num_seqs": 8,
        "num_threads": 1,
        "num_replicas": 2,
        "num_cpus": 0,
        "max_surge_percent": 100,
    }
    with ray_cluster(folder, **arguments) as made:
        yield made


def conversation(i: int) -> Chat:
    return [{"role": "user", "content": f"{i * 7919} " + " ".join(f"item{i * 31 + j}" for j in range(8))}]


def body_of(chat: Chat, **fields: Any) -> dict[str, Any]:
    base = {"model": "tiny", "messages": chat, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    return {**base, **fields}


def replicas(http: httpx.Client) -> set[str]:
    """Return the replicas that some conversations are sent to."""
    found = set()
    for i in range(N_CONVERSATIONS):
        answer = http.post(URL, json=body_of(conversation(i), max_tokens=1))
        assert answer.status_code == 200, answer.text
        found.add(answer.headers[REPLICA])
    return found


def test_the_next_turn_goes_to_the_replica_that_has_the_prefix(cluster: Cluster) -> None:
    places = []
    for i in range(N_CONVERSATIONS):
        chat = conversation(i)
        first = cluster.http.post(URL, json=body_of(chat))
        answer, n_prompt = first.json()["choices"][0]["message"], first.json()["usage"]["prompt_tokens"]
        chat = [*chat, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Go"}]
        second = cluster.http.post(URL, json=body_of(chat))
        assert second.headers[REPLICA] == first.headers[REPLICA]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_prompt - 1
        places.append(first.headers[REPLICA])
    # Names of replicas are random, and places are hashes of them: that all are one is improbable (2^-15).
    assert len(set(places)) == 2


def test_a_replica_can_be_named(cluster: Cluster) -> None:
    """Its metrics, its requests and its timelines are reached so."""
    for name in replicas(cluster.http):
        for _ in range(3):
            assert cluster.http.get("/metrics", headers={REPLICA: name}).headers[REPLICA] == name


def test_errors_and_probes_are_those_of_a_server(cluster: Cluster) -> None:
    http = cluster.http
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post(URL, content=b"{").json()["error"]["code"] == "invalid_body"
    assert http.post(URL, json=body_of([], model="other")).status_code in (400, 404)
    assert http.get("/health", headers={"host": "rebound.example"}).status_code == 200  # as every probe
    assert http.get("/v1/models", headers={"host": "rebound.example"}).status_code == 400
    large = http.post(URL, content=b" " * ((4 << 20) + 1))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    assert len(http.get("/health").headers.get_list("x-request-id")) == 1


def test_a_disconnect_cancels_the_request(cluster: Cluster) -> None:
    with cluster.http.stream(
        "POST", URL, json=body_of(conversation(0), stream=True, max_tokens=8000)
    ) as response:
        name = response.headers[REPLICA]
        next(response.iter_raw())

    def n_running() -> float:
        text = cluster.http.get("/metrics", headers={REPLICA: name}).text
        (family,) = [f for f in text_string_to_metric_families(text) if f.name == "vllm:num_requests_running"]
        return sum(sample.value for sample in family.samples)

    block_until(lambda: n_running() == 0)


@dataclass(frozen=True)
class Answer:
    """One response. `replica` is None if none was reached; `text` is None unless it is whole."""

    status: int
    replica: str | None
    text: str | None
    error: str | None


class Crowd:
    """Clients that send chats until they are stopped."""

    def __init__(self, http: httpx.Client) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._http = http
        self._stopped = threading.Event()
        self._changed = threading.Condition()

    def work(self, first: int) -> None:
        """Send chats of one client. Raises if a response does not have exactly one end."""
        try:
            for i in range(first, 10**6, N_CLIENTS):
                if self._stopped.is_set() and len(self.answers) >= N_CHATS:
                    return
                answer = stream(self._http, i % N_CONVERSATIONS)
                with self._changed:
                    self.answers.append((i % N_CONVERSATIONS, answer))
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._stopped.set()
                self._changed.notify_all()

    def wait(self, n_more: int) -> None:
        """Wait for this many further answers, or until a client has ended."""
        with self._changed:
            n = len(self.answers) + n_more
            assert self._changed.wait_for(lambda: len(self.answers) >= n or self._stopped.is_set(), END_S)

    def stop(self) -> None:
        self._stopped.set()


def stream(http: httpx.Client, i: int) -> Answer:
    """Stream a chat, and check that its response has exactly one end."""
    with http.stream("POST", URL, json=body_of(conversation(i), stream=True)) as response:
        return read(response)


def read(response: httpx.Response) -> Answer:
    """Read a response to its only end."""
    raw, replica = response.read(), response.headers.get(REPLICA)
    if response.status_code != 200:
        return Answer(response.status_code, replica, None, response.json()["error"]["code"])
    found = chunks(raw)
    ends = [chunk for chunk in found if "error" in chunk or chunk["choices"][0]["finish_reason"]]
    assert ends == [found[-1]]
    if "error" in found[-1]:
        return Answer(200, replica, None, found[-1]["error"]["code"])
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found)
    return Answer(200, replica, text, None)


@contextmanager
def long_stream(http: httpx.Client, replica: str | None) -> Iterator[httpx.Response]:
    """Open a stream on a replica that outlives what the test does meanwhile."""
    body = body_of(conversation(0), stream=True, max_tokens=N_LONG)
    with http.stream("POST", URL, json=body, headers={REPLICA: f"{replica}"}) as response:
        assert response.headers[REPLICA] == replica
        yield response


def test_chats_while_one_replica_is_killed_and_all_are_replaced(cluster: Cluster) -> None:
    """The killed replica's requests end with an error; all others are complete and have the usual text."""
    http = cluster.http
    wanted = [stream(http, i) for i in range(N_CONVERSATIONS)]
    killed, staying = sorted({str(answer.replica) for answer in wanted})
    crowd = Crowd(http)
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        clients = [pool.submit(crowd.work, i) for i in range(N_CLIENTS)]
        try:
            crowd.wait(N_CHATS // 4)
            with long_stream(http, killed) as victim, long_stream(http, staying) as survivor:
                cluster.order(f"kill {killed}")
                assert read(victim) == Answer(200, killed, None, "engine_dead")
                long_text = read(survivor).text
                assert long_text is not None
            crowd.wait(N_CHATS // 4)
            with long_stream(http, staying) as drained:
                cluster.order('update {"max_num_queued_reqs": 255}')
                assert read(drained) == Answer(200, staying, long_text, None)
            crowd.wait(N_CHATS // 4)
        finally:
            crowd.stop()
        for client in clients:
            client.result(timeout=END_S)
    assert len(crowd.answers) >= N_CHATS
    lost = [answer for _, answer in crowd.answers if answer.text is None]
    assert len(lost) <= N_CLIENTS, lost
    for answer in lost:
        assert answer.error == "engine_dead"
        assert (answer.status, answer.replica) in ((200, killed), (503, None))
    for i, answer in crowd.answers:
        assert answer.text in (None, wanted[i].text)
    assert not {killed, staying} & replicas(http), "an update replaces every replica"


@pytest.mark.long  # Ray looks at half a minute of load before it removes a replica
def test_load_adds_a_replica_and_quiet_removes_it(cluster: Cluster) -> None:
    http = cluster.http
    load = {"num_replicas": None, "max_replicas": 2, "target_ongoing_requests": 2}
    cluster.order(f"update {json.dumps({**load, 'upscale_delay_s': 0, 'downscale_delay_s': 1})}")
    assert len(replicas(http)) == 1
    crowd = Crowd(http)
    with ThreadPoolExecutor(N_CLIENTS) as pool:
        clients = [pool.submit(crowd.work, i) for i in range(N_CLIENTS)]
        try:
            block_until(lambda: len({answer.replica for _, answer in [*crowd.answers]}) == 2)
        finally:
            crowd.stop()
        for client in clients:
            client.result(timeout=END_S)
    assert all(answer.text is not None for _, answer in crowd.answers)
    block_until(lambda: len(replicas(http)) == 1)
    assert len(replicas(http)) == 1
