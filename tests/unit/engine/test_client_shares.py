"""Client shares of sequence ids, cells, prompt tokens, queue slots and sessions, on the fake core."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import core
from fakes.asks import ask, limits
from fakes.engines import Engine
from fakes.session_runner import SessionRunner
from llaisys.engine.client_shares import ABOVE_CELLS, ABOVE_IDS, WITHIN, ClientShares
from llaisys.engine.request import PREEMPTIONS_MAX, Request, Running
from llaisys.engine.request_queue import WaitingQueue, queue_key
from llaisys.errors import ExhaustedError, QueueFullError


def running(
    ordinal: int, client: str, n_tokens: int = 4, *, preempted: int = 0, priority: int = 0
) -> Request:
    made = Request(ask(f"{ordinal}", [1] * n_tokens, client_id=client, priority=priority), ordinal, 0, 64)
    made.num_computed, made.num_preempted, made.state = n_tokens - 1, preempted, Running(ordinal)
    return made


def shares_of(requests: list[Request], waiting: str = "", **bounds: Any) -> ClientShares:
    queue = WaitingQueue()
    for i, client in enumerate(waiting):
        queue.add(Request(ask(f"w{i}", client_id=client), 1000 + i, 0, 64))
    bounds = {"n_clients": 3, "max_num_seqs": 8, **bounds}
    return ClientShares(limits(**bounds), sorted(requests, key=queue_key), queue)


def ordinals(requests: Any) -> list[int]:
    return [request.ordinal for request in requests]


def made(**changes: Any) -> Engine:
    return Engine(**{"n_clients": 2, "max_num_seqs": 8, "max_num_batched_tokens": 64, **changes})


def running_of(engine: Engine, client: str) -> int:
    return sum(r.source.client_id == client for r in engine.engine.requests.running)


# --- which requests are above a share ---


def test_the_newest_requests_of_a_client_are_above_its_share() -> None:
    shares = shares_of([running(i, "a") for i in range(6)] + [running(9, "b")], waiting="b")
    assert (shares.n_ids, shares.is_contended) == (4, True)
    assert ordinals(shares.order) == [0, 1, 2, 3, 9, 4, 5]
    head = Request(ask("w", client_id="b"), 10, 0, 64)
    assert ordinals(shares.preemptible(head)) == [5, 4]


def test_the_oldest_and_the_reserved_requests_count_first() -> None:
    requests = [running(i, "a", preempted=PREEMPTIONS_MAX * (i > 4)) for i in range(7)]
    shares = shares_of(requests, waiting="b")
    assert [shares.level(r) for r in requests] == [WITHIN, WITHIN, ABOVE_IDS, ABOVE_IDS, ABOVE_IDS, 0, 0]
    assert ordinals(shares.preemptible(running(10, "b"))) == [4, 3, 2]


def test_a_client_with_few_requests_may_be_above_its_cells() -> None:
    requests = [running(0, "a", 60), running(1, "a", 60), running(2, "a", 60), running(3, "b", 60)]
    shares = shares_of(requests, n_cells=256)
    assert [shares.level(r) for r in requests] == [WITHIN, WITHIN, ABOVE_CELLS, WITHIN]
    assert shares.is_below(running(5, "b", 60))
    assert not shares.is_below(running(5, "a", 60))


def test_a_request_of_better_priority_is_not_preempted_for_a_share() -> None:
    shares = shares_of([running(i, "a", priority=i % 2) for i in range(6)], waiting="b")
    assert ordinals(shares.preemptible(running(10, "b", priority=1))) == [5, 3]


def test_without_contention_or_shares_no_request_is_above() -> None:
    requests = [running(i, "a") for i in range(8)]
    for shares in (shares_of(requests), shares_of(requests, waiting="b", n_clients=1)):
        assert not shares.is_contended
        assert shares.order == requests


def test_reservations_leave_other_clients_their_share() -> None:
    """With eight ids and two clients, three may be reserved; a fourth above the share stays preemptible."""
    reserved = [running(i, "a", preempted=PREEMPTIONS_MAX) for i in range(4)]
    for n, may in ((0, True), (2, True), (3, False)):
        assert shares_of(reserved[:n], n_clients=2, n_cells=1000).may_reserve(reserved[3]) == may
    assert not shares_of(reserved[:2], n_clients=2, n_cells=2 * 3 * 64 - 2).may_reserve(reserved[3])
    assert shares_of([], n_clients=2, n_cells=64).may_reserve(reserved[3]), (
        "a lone request may always reserve"
    )


clients_of_requests = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 40)), max_size=8
)


@given(clients_of_requests, st.sampled_from(["", "a", "bc"]))
def test_requests_above_a_share_match_a_slow_model(facts: list[tuple[str, bool, int]], waiting: str) -> None:
    """Slow model: each client has as many requests within its share as it has ids, if cells allow."""
    requests = [running(i, c, n, preempted=3 * reserved) for i, (c, reserved, n) in enumerate(facts)]
    shares = shares_of(requests, waiting, n_cells=10_000)
    clients = {c for c, _, _ in facts} | set(waiting)
    share = max(1, 8 // max(1, len(clients)))
    for client in clients:
        mine = [r for r in requests if r.source.client_id == client]
        above = [r for r in mine if shares.level(r) == ABOVE_IDS]
        assert len(above) == max(0, len(mine) - share)
        n_kept = sum(r.worst_case_reserved or r is requests[0] for r in mine)
        if n_kept <= share:
            assert not any(r.worst_case_reserved or r is requests[0] for r in above)
    if requests:
        assert shares.order[0] is requests[0]
    victims = shares.preemptible(running(99, "d"))
    assert all(not r.worst_case_reserved and r is not requests[0] for r in victims)


# --- running requests ---


def test_choices_of_one_client_do_not_keep_all_sequence_ids() -> None:
    """One client has eight choices; the other client's request runs in the step after its arrival."""
    engine = made()
    engine.submit("flood", prompt=[1, 2], n=8, max_tokens=40, client_id="a")
    engine.step(9)
    assert running_of(engine, "a") == 8
    engine.submit("one", prompt=[9], max_tokens=1, client_id="b")
    engine.step()
    assert "one" in engine.ends
    assert running_of(engine, "a") == 7
    engine.finish()
    assert engine.tokens["one"] == core.answer([9], 1)
    assert engine.tokens["flood"] == core.answer([1, 2], 40)
    assert all(engine.tokens["flood", i] == core.answer([1, 2], 40) for i in range(1, 8))


def test_a_client_gains_one_request_per_step_up_to_its_share() -> None:
    engine = made(max_num_queued_reqs=64)
    engine.submit(*(f"a{i}" for i in range(12)), max_tokens=60, client_id="a")
    engine.step(4)
    assert running_of(engine, "a") == 8
    engine.submit(*(f"b{i}" for i in range(6)), prompt=[7], max_tokens=60, client_id="b")
    for n in range(1, 5):
        engine.step()
        assert (running_of(engine, "a"), running_of(engine, "b")) == (8 - n, n)
    engine.step(3)
    assert (running_of(engine, "a"), running_of(engine, "b")) == (4, 4)
    assert engine.engine.stats().num_preempted == 4
    engine.finish()
    assert all(engine.tokens[f"a{i}"] == core.answer([1, 2, 3], 60) for i in range(12))


def test_a_lone_client_uses_all_ids() -> None:
    engine = made()
    engine.submit(*"abcdefgh", max_tokens=20, client_id="a")
    engine.step(3)
    assert running_of(engine, "a") == 8
    engine.finish()
    assert engine.engine.stats().num_preempted == 0


def test_a_client_above_its_cells_is_preempted_newest_first() -> None:
    """A few requests use all cells while ids are free: the newest are preempted, not the oldest."""
    engine = made(n_cells=128)
    for i in range(4):
        engine.submit(f"a{i}", prompt=[i] * 20, max_tokens=20, client_id="a")
    engine.step(6)
    assert running_of(engine, "a") == 4
    engine.submit("b", prompt=[9] * 30, max_tokens=2, client_id="b")
    engine.step(2)
    assert "b" in engine.ends
    assert "a0" in {r.request_id for r in engine.engine.requests.running}
    engine.finish()


def test_sessions_keep_their_pins_when_only_an_id_is_needed() -> None:
    engine = made()
    engine.submit("chat", session_id="s", client_id="a")
    engine.finish()
    n_pinned = engine.engine.stats().kv_cells_session
    engine.submit("flood", n=8, max_tokens=40, client_id="a")
    engine.step(9)
    engine.submit("one", prompt=[9], max_tokens=1, client_id="b")
    engine.step()
    assert engine.engine.stats().num_preempted == 1
    assert engine.engine.stats().kv_cells_session == n_pinned > 0


def test_long_prompts_leave_other_clients_their_share_of_a_step() -> None:
    engine = made(max_num_batched_tokens=8, max_model_len=64, n_cells=512)
    engine.submit("a0", "a1", "a2", prompt=[1] * 50, client_id="a")
    engine.step()
    engine.submit("b", prompt=[2, 3, 4], max_tokens=1, client_id="b")
    engine.step()
    assert "b" in engine.ends
    assert engine.engine.stats().step_prefill_tokens == 8, "one client uses what the other does not need"
    engine.finish()


# --- waiting requests ---


def test_queue_slots_are_shared_among_clients() -> None:
    engine = made(max_num_seqs=2, max_num_queued_reqs=8)
    for i in range(2 + 6):  # two are admitted, and six of the eight slots may be used
        engine.submit(f"a{i}", max_tokens=30, client_id="a")
    with pytest.raises(QueueFullError, match="of this client wait;"):
        engine.submit("a8", client_id="a")
    engine.step()
    engine.submit("b0", "b1", client_id="b")
    with pytest.raises(QueueFullError):
        engine.submit("b2", client_id="b")
    engine.finish()


def test_queued_tokens_are_shared_among_clients() -> None:
    engine = made(max_num_seqs=2, max_num_queued_tokens=80, max_num_queued_reqs=64)
    engine.submit("a0", "a1", max_tokens=30, client_id="a")
    engine.step()
    engine.submit("a2", "a3", prompt=[1] * 30, client_id="a")
    with pytest.raises(QueueFullError, match="61 of this client's prompt tokens would wait"):
        engine.submit("a4", prompt=[1], client_id="a")
    engine.submit("b0", client_id="b")
    engine.submit("b1", prompt=[1] * 17, client_id="b")
    engine.finish()


# --- sessions ---


def test_sessions_are_shared_among_clients() -> None:
    runner = SessionRunner(max_sessions=8, n_clients=2)
    for i in range(6):
        runner.call("create", f"s{i}", client_id="a")
    runner.begin("create", "s6", client_id="a")
    with pytest.raises(ExhaustedError, match=r"this client has 6 sessions \(2 are reserved for it\)"):
        runner.end()
    for name in ("x", "y"):
        runner.call("create", name, client_id="b")
    runner.begin("create", "z", client_id="b")
    with pytest.raises(ExhaustedError):
        runner.end()


def test_session_pins_of_one_client_do_not_evict_those_of_another() -> None:
    runner = SessionRunner(n_cells=200, session_kv_share=0.3, n_clients=2)
    runner.run("b", [9] * 20, max_tokens=1, session_id="mine", client_id="b", cache_salt="b/")
    for i in range(4):
        runner.run(f"a{i}", [i] * 20, max_tokens=1, session_id=f"s{i}", client_id="a", cache_salt="a/")
    runner.begin("list", client_id="b")
    assert [session.num_pinned_tokens for session in runner.end()] == [20]
    runner.begin("list", client_id="a")
    assert [session.num_pinned_tokens for session in runner.end()] == [0, 0, 20, 20]
