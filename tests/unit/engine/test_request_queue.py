"""Order of waiting requests: priority, then deficit round robin over clients, then arrival."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.asks import ask
from llaisys.engine.request import BrokenInvariant, Request, Running
from llaisys.engine.request_queue import DeficitRoundRobin, OpenRequests, RoundRobinState, WaitingQueue

NEVER = float("-inf")


def request(ordinal: int, client: str = "", n_prompt: int = 10, **changes: object) -> Request:
    source = ask(f"{ordinal}", [1] * n_prompt, client_id=client, **changes)
    return Request(source, ordinal=ordinal, seed=0, token_limit=n_prompt + 1)


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for each in requests:
        queue.add(each)
    return queue


def drain(queue: WaitingQueue, fair: RoundRobinState | None = None, quantum: int = 10) -> list[int]:
    """Return the ordinals of all requests in the order in which they leave the queue."""
    round_robin = DeficitRoundRobin(queue, fair or RoundRobinState(), quantum, NEVER)
    order = []
    while (head := round_robin.peek_next()) is not None:
        assert round_robin.peek_next() is head, "peek_next has no side effects"
        round_robin.pop(head, len(head.token_ids))
        order.append(head.ordinal)
    assert round_robin.state() == RoundRobinState()
    return order


def test_requests_of_one_client_are_first_come_first_served() -> None:
    assert drain(queue_of(*(request(i, n_prompt=50 - i) for i in (3, 1, 4, 2)))) == [1, 2, 3, 4]


def test_clients_are_served_round_robin_by_tokens() -> None:
    flood = [request(i, "flood", 10) for i in range(8)]
    assert drain(queue_of(*flood, request(8, "x", 20), request(9, "y", 10))) == [0, 9, 1, 8, 2, 3, 4, 5, 6, 7]


def test_priority_precedes_round_robin() -> None:
    waiting = [request(0, "a"), request(1, "a"), request(2, "b", priority=1), request(3, "c", priority=-1)]
    assert drain(queue_of(*waiting)) == [3, 0, 1, 2]


def test_a_preempted_request_is_older_and_leads_its_queue() -> None:
    queue = queue_of(request(5), request(7))
    queue.add(request(2))
    assert drain(queue) == [2, 5, 7]


def test_generated_tokens_are_charged_while_other_clients_wait() -> None:
    queue = queue_of(request(0, "a"), request(1, "a"), request(2, "b"), request(3, "b"))
    round_robin = DeficitRoundRobin(queue, RoundRobinState(), 10, NEVER)
    taken = []
    for _ in range(2):
        head = round_robin.peek_next()
        assert head is not None
        round_robin.pop(head, 10)
        taken.append(head)
    assert [r.ordinal for r in taken] == [0, 2]
    fair, queue = round_robin.state(), queue.without(taken)
    assert drain(queue, fair) == [1, 3]
    charged = fair.charge(request(0, "a"), 1000)
    assert drain(queue, charged) == [3, 1]
    assert RoundRobinState().charge(request(0, "a"), 1000) == RoundRobinState()


def test_a_skipped_client_keeps_its_deficit() -> None:
    round_robin = DeficitRoundRobin(
        queue_of(request(0, "a"), request(1, "a"), request(2, "b")), RoundRobinState(), 10, NEVER
    )
    first = round_robin.peek_next()
    assert first is not None
    round_robin.skip_client(first)
    second = round_robin.peek_next()
    assert second is not None
    assert (first.ordinal, second.ordinal) == (0, 2)
    round_robin.pop(second, 10)
    assert round_robin.peek_next() is None
    assert {key for key, _ in round_robin.state().deficits} == {(0, "a")}


def test_overdue_requests_precede_all_others() -> None:
    queue = queue_of(
        request(0, "a", priority=-1, arrival_s=100.0),
        request(1, "b", arrival_s=50.0),
        request(2, "c", arrival_s=40.0),
    )
    round_robin = DeficitRoundRobin(queue, RoundRobinState(), 10, overdue_before_s=50.0)
    order = []
    while (head := round_robin.peek_next()) is not None:
        round_robin.pop(head, 10)
        order.append(head.ordinal)
    assert order == [2, 1, 0]


def test_the_queue_removes_empty_client_queues() -> None:
    first, second = request(0, "a"), request(1, "b")
    queue = queue_of(first, second)
    assert [r.ordinal for r in queue.without([first])] == [1]
    queue.remove(first)
    assert (len(queue), list(queue.client_queues)) == (1, [(0, "b")])


requests = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=40)


@given(requests, st.integers(1, 40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_clients_differ_by_at_most_a_quantum_and_a_request(
    arrivals: list[tuple[str, int]], quantum: int, cuts: list[bool]
) -> None:
    """Checks the bound of deficit round robin, also when its state passes from plan to plan."""
    most = max((n for _, n in arrivals), default=0)
    queue = queue_of(*(request(i, client, n) for i, (client, n) in enumerate(arrivals)))
    served = dict.fromkeys("abc", 0)
    order = []
    round_robin = DeficitRoundRobin(queue, RoundRobinState(), quantum, NEVER)
    while (head := round_robin.peek_next()) is not None:
        round_robin.pop(head, len(head.token_ids))
        order.append(head)
        served[head.source.client_id] += len(head.token_ids)
        left = queue.without(order)
        if cuts[len(order) - 1]:
            round_robin = DeficitRoundRobin(left, round_robin.state(), quantum, NEVER)
            queue = left
        backlogged = [served[client] for _, client in left.client_queues]
        if len(backlogged) == len({client for client, _ in arrivals}):
            assert max(backlogged) - min(backlogged) <= 2 * (quantum + most)
    assert sorted(r.ordinal for r in order) == list(range(len(arrivals)))
    for client in "abc":
        mine = [r.ordinal for r in order if r.source.client_id == client]
        assert mine == sorted(mine)


@given(requests, st.integers(1, 7))
def test_skipping_whole_rounds_keeps_the_order(arrivals: list[tuple[str, int]], quantum: int) -> None:
    queue = queue_of(*(request(i, client, n) for i, (client, n) in enumerate(arrivals)))
    client_queues = {
        client: [(i, n) for i, (c, n) in enumerate(arrivals) if c == client] for client, _ in arrivals
    }
    turn = list(client_queues)
    deficits = dict.fromkeys(turn, 0)
    if turn:
        deficits[turn[0]] = quantum
    want = []
    while turn:
        client = turn[0]
        ordinal, cost = client_queues[client][0]
        if deficits[client] >= cost:
            deficits[client] -= cost
            want.append(ordinal)
            client_queues[client].pop(0)
            if not client_queues[client]:
                turn.pop(0)
                if turn:
                    deficits[turn[0]] += quantum
        else:
            turn.append(turn.pop(0))
            deficits[turn[0]] += quantum
    assert drain(queue, quantum=quantum) == want


# --- check() detects corruption ---


def _forget_ordinals(requests: OpenRequests, _: Request) -> None:
    requests.by_ordinal.clear()


def _list_twice(requests: OpenRequests, waiting: Request) -> None:
    requests.running.append(waiting)


def _forget_choices(requests: OpenRequests, _: Request) -> None:
    requests._choices.clear()


def _miscount_preempted(requests: OpenRequests, _: Request) -> None:
    requests.waiting.n_preempted += 1


def _miscount_siblings(requests: OpenRequests, _: Request) -> None:
    requests.waiting.n_siblings += 1


def _run_in_the_queue(_: OpenRequests, waiting: Request) -> None:
    waiting.state = Running(7)


def _keep_cells_in_the_queue(_: OpenRequests, waiting: Request) -> None:
    waiting.num_computed = 3


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_forget_ordinals, "in no list, in two lists, or in the wrong one"),
        (_list_twice, "in no list, in two lists, or in the wrong one"),
        (_forget_choices, "a choice has no request"),
        (_miscount_preempted, "0 preempted and 0 sibling choices wait"),
        (_miscount_siblings, "0 preempted and 0 sibling choices wait"),
        (_run_in_the_queue, "request 1 in state Running"),
        (_keep_cells_in_the_queue, "request 1 in state Waiting"),
    ],
)
def test_check_detects_corruption(corrupt: Callable[[OpenRequests, Request], None], message: str) -> None:
    open_requests, waiting, running = OpenRequests(), request(1), request(2)
    for each in (waiting, running):
        open_requests.add([each])
    running.state = Running(5)
    open_requests.start(running)
    open_requests.check()
    corrupt(open_requests, waiting)
    with pytest.raises(BrokenInvariant, match=message):
        open_requests.check()
