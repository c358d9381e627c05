"""Order among those who wait: priority, clients in turn by tokens, arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakes.asks import ask
from llaisys.engine.request import Request
from llaisys.engine.request_queue import DeficitRoundRobin, RoundRobinState, WaitingQueue

NEVER = float("-inf")


def request(ordinal: int, client: str = "", n_prompt: int = 10, **changes: object) -> Request:
    source = ask(f"{ordinal}", [1] * n_prompt, client_id=client, **changes)
    return Request(source, ordinal=ordinal, seed=0, token_limit=n_prompt + 1)


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for each in requests:
        queue.add(each)
    return queue


def walk(queue: WaitingQueue, fair: RoundRobinState | None = None, quantum: int = 10) -> list[int]:
    """Everybody, in the order in which they go."""
    turns = DeficitRoundRobin(queue, fair or RoundRobinState(), quantum, NEVER)
    order = []
    while (head := turns.peek_next()) is not None:
        assert turns.peek_next() is head, "asking changes nothing"
        turns.pop(head, len(head.token_ids))
        order.append(head.ordinal)
    assert turns.state() == RoundRobinState()
    return order


def test_one_client_is_first_come_first_served() -> None:
    assert walk(queue_of(*(request(i, n_prompt=50 - i) for i in (3, 1, 4, 2)))) == [1, 2, 3, 4]


def test_clients_take_turns_by_tokens() -> None:
    flood = [request(i, "flood", 10) for i in range(8)]
    assert walk(queue_of(*flood, request(8, "x", 20), request(9, "y", 10))) == [0, 9, 1, 8, 2, 3, 4, 5, 6, 7]


def test_priority_comes_before_turns() -> None:
    waiting = [request(0, "a"), request(1, "a"), request(2, "b", priority=1), request(3, "c", priority=-1)]
    assert walk(queue_of(*waiting)) == [3, 0, 1, 2]


def test_who_was_preempted_is_older_and_stands_at_the_head() -> None:
    queue = queue_of(request(5), request(7))
    queue.add(request(2))
    assert walk(queue) == [2, 5, 7]


def test_what_was_generated_is_charged_while_others_wait() -> None:
    queue = queue_of(request(0, "a"), request(1, "a"), request(2, "b"), request(3, "b"))
    turns = DeficitRoundRobin(queue, RoundRobinState(), 10, NEVER)
    taken = []
    for _ in range(2):
        head = turns.peek_next()
        assert head is not None
        turns.pop(head, 10)
        taken.append(head)
    assert [r.ordinal for r in taken] == [0, 2]
    fair, queue = turns.state(), queue.without(taken)
    assert walk(queue, fair) == [1, 3]
    charged = fair.charge(request(0, "a"), 1000)
    assert walk(queue, charged) == [3, 1]
    assert RoundRobinState().charge(request(0, "a"), 1000) == RoundRobinState()


def test_a_client_that_is_passed_over_comes_again() -> None:
    turns = DeficitRoundRobin(
        queue_of(request(0, "a"), request(1, "a"), request(2, "b")), RoundRobinState(), 10, NEVER
    )
    first = turns.peek_next()
    assert first is not None
    turns.skip_client(first)
    second = turns.peek_next()
    assert second is not None
    assert (first.ordinal, second.ordinal) == (0, 2)
    turns.pop(second, 10)
    assert turns.peek_next() is None
    assert {key for key, _ in turns.state().deficits} == {(0, "a")}


def test_who_has_waited_too_long_goes_before_all() -> None:
    queue = queue_of(
        request(0, "a", priority=-1, arrival_s=100.0),
        request(1, "b", arrival_s=50.0),
        request(2, "c", arrival_s=40.0),
    )
    turns = DeficitRoundRobin(queue, RoundRobinState(), 10, overdue_before_s=50.0)
    order = []
    while (head := turns.peek_next()) is not None:
        turns.pop(head, 10)
        order.append(head.ordinal)
    assert order == [2, 1, 0]


def test_the_queue_keeps_no_empty_line() -> None:
    first, second = request(0, "a"), request(1, "b")
    queue = queue_of(first, second)
    assert [r.ordinal for r in queue.without([first])] == [1]
    queue.remove(first)
    assert (len(queue), list(queue.client_queues)) == (1, [(0, "b")])


requests = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), max_size=40)


@given(requests, st.integers(1, 40), st.lists(st.booleans(), min_size=40, max_size=40))
def test_nobody_is_served_more_than_a_quantum_and_a_request_ahead(
    asked: list[tuple[str, int]], quantum: int, cuts: list[bool]
) -> None:
    """The bound of deficit round robin, with the state carried over plans or not."""
    most = max((n for _, n in asked), default=0)
    queue = queue_of(*(request(i, client, n) for i, (client, n) in enumerate(asked)))
    served = dict.fromkeys("abc", 0)
    order = []
    turns = DeficitRoundRobin(queue, RoundRobinState(), quantum, NEVER)
    while (head := turns.peek_next()) is not None:
        turns.pop(head, len(head.token_ids))
        order.append(head)
        served[head.source.client_id] += len(head.token_ids)
        left = queue.without(order)
        if cuts[len(order) - 1]:
            turns = DeficitRoundRobin(left, turns.state(), quantum, NEVER)
            queue = left
        backlogged = [served[client] for _, client in left.client_queues]
        if len(backlogged) == len({client for client, _ in asked}):
            assert max(backlogged) - min(backlogged) <= 2 * (quantum + most)
    assert sorted(r.ordinal for r in order) == list(range(len(asked)))
    for client in "abc":
        mine = [r.ordinal for r in order if r.source.client_id == client]
        assert mine == sorted(mine)


@given(requests, st.integers(1, 7))
def test_skipping_whole_rounds_gives_the_order_of_walking_them(
    asked: list[tuple[str, int]], quantum: int
) -> None:
    queue = queue_of(*(request(i, client, n) for i, (client, n) in enumerate(asked)))
    lines = {client: [(i, n) for i, (c, n) in enumerate(asked) if c == client] for client, _ in asked}
    turn = list(lines)
    deficits = dict.fromkeys(turn, 0)
    if turn:
        deficits[turn[0]] = quantum
    want = []
    while turn:
        client = turn[0]
        ordinal, cost = lines[client][0]
        if deficits[client] >= cost:
            deficits[client] -= cost
            want.append(ordinal)
            lines[client].pop(0)
            if not lines[client]:
                turn.pop(0)
                if turn:
                    deficits[turn[0]] += quantum
        else:
            turn.append(turn.pop(0))
            deficits[turn[0]] += quantum
    assert walk(queue, quantum=quantum) == want
