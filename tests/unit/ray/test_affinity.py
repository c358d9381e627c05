"""Which replica a request should run on: by conversation or session, and by load."""

from __future__ import annotations

from typing import Any

import pytest

from llaisys.ray.affinity import PREFIX_LENGTH, Affinity, affinity_of, rank_replicas

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "What is gravity?"}
NEXT = [{"role": "assistant", "content": "A force."}, {"role": "user", "content": "And mass?"}]


def key(body: Any, path: str = CHAT) -> bytes:
    return affinity_of(path, body).key


@pytest.mark.parametrize("name", ["messages", "input"])
def test_all_turns_of_a_conversation_have_one_key(name: str) -> None:
    first = key({name: [SYSTEM, FIRST]})
    assert first
    assert key({name: [SYSTEM, FIRST, *NEXT], "max_tokens": 3}) == first
    assert key({name: [SYSTEM, {"role": "user", "content": "What is mass?"}]}) != first
    assert key({name: [SYSTEM, FIRST], "model": "other"}) != first


@pytest.mark.parametrize("head", ["x" * PREFIX_LENGTH, list(range(PREFIX_LENGTH))])
def test_a_prompt_counts_by_its_beginning(head: Any) -> None:
    assert key({"prompt": head}) == key({"prompt": head + head})
    assert key({"prompt": head}) != key({"prompt": head[1:]})


def test_a_session_has_the_key_of_its_name_in_the_body_and_in_the_path() -> None:
    by_body = affinity_of(CHAT, {"session_id": "chat-1", "messages": [FIRST]})
    assert by_body.is_session
    assert affinity_of("/v1/sessions/chat-1/fork", {"n_tokens": 3}) == by_body
    assert affinity_of("/v1/sessions", {"session_id": "chat-1"}) == by_body
    assert affinity_of("/v1/sessions/chat-2", None) != by_body


@pytest.mark.parametrize(
    "body", [None, [], "text", {}, {"messages": []}, {"messages": None}, {"prompt": ""}, {"session_id": 3}]
)
def test_a_request_without_a_prompt_has_no_key(body: Any) -> None:
    assert affinity_of(CHAT, body) == Affinity()


@pytest.mark.parametrize("body", [{"messages": 7}, {"messages": [3, None]}, {"input": {"a": "\ud800"}}])
def test_any_json_has_an_affinity(body: Any) -> None:
    assert key(body)


def names(n: int) -> list[str]:
    return [f"replica-{i}" for i in range(n)]


def keys(n: int = 300) -> list[Affinity]:
    return [Affinity(f"{i}".encode()) for i in range(n)]


def first_of(affinity: Affinity, replicas: list[str]) -> str:
    return rank_replicas(affinity, dict.fromkeys(replicas, 0), 8)[0]


def test_keys_are_spread_evenly_and_do_not_depend_on_the_order_of_the_replicas() -> None:
    chosen = [first_of(each, names(3)) for each in keys()]
    assert all(chosen.count(name) > 60 for name in names(3))
    assert chosen == [first_of(each, names(3)[::-1]) for each in keys()]


def test_only_the_keys_of_a_replica_that_goes_move() -> None:
    left = names(4)[:3]
    for each in keys():
        before = first_of(each, names(4))
        assert before not in left or first_of(each, left) == before


def test_a_busy_replica_is_tried_after_the_others() -> None:
    for each in keys(20):
        first, second, third = rank_replicas(each, dict.fromkeys(names(3), 0), 8)
        assert rank_replicas(each, {first: 7, second: 0, third: 0}, 8) == [first, second, third]
        assert rank_replicas(each, {first: 8, second: 7, third: 0}, 8) == [second, third, first]
        assert rank_replicas(each, {first: 12, second: 9, third: 8}, 8) == [third, second, first]


def test_a_session_stays_where_it_is() -> None:
    for i in range(20):
        each = Affinity(f"{i}".encode(), is_session=True)
        first, second = rank_replicas(each, dict.fromkeys(names(2), 0), 8)
        assert rank_replicas(each, {first: 100, second: 0}, 8) == [first, second]
