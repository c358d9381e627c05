"""Request states: every pair of state and event, finish reasons, and seeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.asks import ask
from llaisys.engine.request import (
    Admitted,
    BrokenInvariant,
    Cancelled,
    Completed,
    Event,
    Expired,
    Failed,
    Finished,
    Preempted,
    Preemption,
    Request,
    Restored,
    RestoreFailed,
    Running,
    State,
    Waiting,
    WaitingForRemoteKvs,
    advance,
    derive_seed,
)
from llaisys.errors import RequestFailedError, RequestTimeoutError
from llaisys.outputs import FinishReason

ERROR = RequestFailedError("row")
REMOTE = WaitingForRemoteKvs("chat")
STATES: list[State] = [Waiting(), REMOTE, Running(7, 1), Preempted(), Finished(FinishReason.STOP)]
EVENTS: list[Event] = [
    Admitted(7, 1),
    Preemption(),
    Restored(),
    RestoreFailed(ERROR),
    Completed(FinishReason.STOP, 5),
    Completed(FinishReason.LENGTH),
    Cancelled(),
    Expired(3.0),
    Failed(ERROR),
]
ABORTED, BROKEN = Finished(FinishReason.ABORT), Finished(FinishReason.ERROR, error=ERROR)
MOVES: dict[tuple[State, Event], State] = {
    (Waiting(), Admitted(7, 1)): Running(7, 1),
    (Waiting(), Cancelled()): ABORTED,
    (Waiting(), Failed(ERROR)): BROKEN,
    (REMOTE, Restored()): Waiting(),
    (REMOTE, RestoreFailed(ERROR)): BROKEN,
    (REMOTE, Cancelled()): ABORTED,
    (Running(7, 1), Preemption()): Preempted(),
    (Running(7, 1), Completed(FinishReason.STOP, 5)): Finished(FinishReason.STOP, 5),
    (Running(7, 1), Completed(FinishReason.LENGTH)): Finished(FinishReason.LENGTH),
    (Running(7, 1), Cancelled()): ABORTED,
    (Running(7, 1), Failed(ERROR)): BROKEN,
    (Preempted(), Admitted(7, 1)): Running(7, 1),
    (Preempted(), Cancelled()): ABORTED,
    (Preempted(), Failed(ERROR)): BROKEN,
    (Finished(FinishReason.STOP), Cancelled()): Finished(FinishReason.STOP),
}


@pytest.mark.parametrize("state", STATES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_every_transition_is_defined_or_rejected(state: State, event: Event) -> None:
    if isinstance(event, Expired) and not isinstance(state, Finished):
        end = advance(state, event)
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.TIMEOUT
        assert isinstance(end.error, RequestTimeoutError)
    elif (state, event) in MOVES:
        assert advance(state, event) == MOVES[state, event]
    else:
        with pytest.raises(BrokenInvariant, match="cannot happen"):
            advance(state, event)


def made(limit: int = 100, **changes: object) -> Request:
    return Request(ask(**changes), ordinal=0, seed=0, token_limit=limit)


@pytest.mark.parametrize(
    ("changes", "token", "end"),
    [
        ({}, 9, None),
        ({}, 256, Completed(FinishReason.STOP)),
        ({}, 257, Completed(FinishReason.STOP)),
        ({"ignore_eos": True}, 256, None),
        ({"stop_token_ids": [9]}, 9, Completed(FinishReason.STOP, 9)),
        ({"stop_token_ids": [256], "ignore_eos": True}, 256, Completed(FinishReason.STOP, 256)),
        ({"stop_token_ids": [256]}, 256, Completed(FinishReason.STOP)),
        ({"limit": 4}, 9, Completed(FinishReason.LENGTH)),
        ({"limit": 4}, 256, Completed(FinishReason.STOP)),
        ({"limit": 5}, 9, None),
    ],
)
def test_finish_reason_of_each_token(changes: dict[str, object], token: int, end: Completed | None) -> None:
    request = made(**changes)
    assert request.append_token(token) == end
    assert (request.token_ids.tolist(), request.num_output) == ([1, 2, 3, token], 1)


def test_token_counts_and_stop_ids() -> None:
    request = made(stop_token_ids=[4])
    assert (request.num_missing, request.num_output, request.stop_ids) == (3, 0, {256, 257, 4})
    assert made(stop_token_ids=[4], ignore_eos=True).stop_ids == {4}
    request.num_computed = 3
    request.append_token(5)
    assert (request.num_missing, request.num_output) == (1, 1)
    assert request.source.prompt_token_ids == [1, 2, 3]


def test_derived_seeds_are_splitmix64() -> None:
    """Compares with the published first outputs of the generator for seed 1234567."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [derive_seed(1234567, i) for i in range(3)] == want


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_derived_seeds_have_64_bits_and_differ_by_ordinal(seed: int, ordinal: int) -> None:
    assert 0 <= derive_seed(seed, ordinal) < 2**64
    assert derive_seed(seed, ordinal) != derive_seed(seed, ordinal + 1)
