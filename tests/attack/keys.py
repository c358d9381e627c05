"""One key uses all that it can get, and requests of another key still get responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from attack.sockets import opened
from attack.target import Group, Reply, Target

GROUP = Group("keys")
SHORT = {"prompt": "a", "max_tokens": 1}


def _raw(target: Target, path: str, body: Any) -> bytes:
    return target.request("POST", path, json.dumps(body).encode())


@GROUP.case(200)
def all_sequence_ids(target: Target) -> Iterator[Reply]:
    body = {"prompt": "a", "n": 8, "max_tokens": 400, "ignore_eos": True}
    with opened(target, [_raw(target, "/v1/completions", body)] * 8):
        yield target.post("/v1/completions", SHORT, key=target.other_key)


@GROUP.case(200)
def all_places_of_the_queue(target: Target) -> Iterator[Reply]:
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    with opened(target, [_raw(target, "/v1/completions", body)] * 400):
        yield target.post("/v1/completions", SHORT, key=target.other_key)


@GROUP.case(200)
def many_embeddings(target: Target) -> Iterator[Reply]:
    body = {"input": ["some text to embed"] * 64}
    with opened(target, [_raw(target, "/v1/embeddings", body)] * 24):
        yield target.post("/v1/completions", SHORT, key=target.other_key)


@GROUP.case(200)
def bodies_that_are_declared_and_not_sent(target: Target) -> Iterator[Reply]:
    head = target.head(
        "POST", "/v1/completions", f"Content-Length: {4 << 20}", "Content-Type: application/json"
    )
    with opened(target, [head] * 32):
        yield target.post("/v1/completions", SHORT, key=target.other_key)


@GROUP.case(200)
def all_sessions(target: Target) -> Iterator[Reply]:
    for i in range(300):
        reply = target.post("/v1/sessions", {"session_id": f"s{i}"})
        if reply.status == 429:
            break
        assert reply.status == 200, reply.head
    yield target.post("/v1/sessions", {"session_id": "mine"}, key=target.other_key)
    yield target.send(target.request("DELETE", "/v1/sessions/mine", key=target.other_key))
    for j in range(i + 1):
        target.send(target.request("DELETE", f"/v1/sessions/s{j}"))


@GROUP.case(401)
def keys_that_are_none(target: Target) -> Iterator[Reply]:
    for key in (" ", "x", target.key[:-1], target.key + "x", "\xe9" * 100, "k" * 10_000):
        yield target.get("/v1/models", key=key)
    yield target.get("/v1/models", key=None)
    yield target.send(
        target.head("GET", "/v1/models", "Authorization: Bearer ", "Connection: close", key=None)
    )


@GROUP.case(400, 404)
def ids_of_another_key(target: Target) -> Iterator[Reply]:
    """The server reveals neither open nor ended requests of another key."""
    raw = target.request(
        "POST", "/v1/completions", json.dumps({**SHORT, "request_id": "theirs"}).encode(), target.other_key
    )
    assert target.send(raw).status == 200
    yield target.send(target.request("POST", "/v1/requests/cmpl-theirs/cancel"))
    yield target.get("/v1/requests/cmpl-theirs/timeline")
    yield target.get("/v1/requests/cmpl-never/timeline")
