"""EngineClient with several API clients: each client has its share of open requests and session calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fakes.asks import ask, limits
from llaisys.engine.client import CALLS_MAX, EngineClient
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import ExhaustedError, QueueFullError


class Silent(EngineClient):
    """A client of an engine that accepts everything and never replies."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(limits(**changes), lambda _: None, None)
        self._connection = self  # type: ignore[assignment]
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def _stop(self) -> None:
        """Do nothing."""


def fill(call: Callable[[int], Any], error: type[Exception]) -> int:
    """Return how many calls succeed before `error`."""
    for n in range(1000):
        try:
            call(n)
        except error:
            return n
    raise AssertionError("the call has no bound")


def test_each_client_has_its_share_of_open_requests() -> None:
    client = Silent(max_num_seqs=4, max_num_queued_reqs=8, n_clients=2)

    def submit(name: str) -> Callable[[int], None]:
        return lambda n: client.submit(ask(f"{name}{n}", client_id=name))

    assert fill(submit("a"), QueueFullError) == 12, (
        "4 running, 4 preempted and 8 waiting requests, less the other client's share"
    )
    assert client.queue_full_error("a") is not None
    assert client.queue_full_error("b") is None
    assert fill(submit("b"), QueueFullError) == 4
    assert client.queue_full_error("b") is not None
    assert len(client.sent) <= client._inbox_max


def test_without_shares_one_client_may_open_all_requests() -> None:
    client = Silent(max_num_seqs=4, max_num_queued_reqs=8)
    assert fill(lambda n: client.submit(ask(f"{n}", client_id=f"{n % 3}")), QueueFullError) == 12
    assert client.queue_full_error("new") is not None


def test_each_client_has_its_share_of_session_calls() -> None:
    client = Silent(n_clients=2)

    def call(name: str) -> Callable[[int], Any]:
        return lambda _: client.call_session(SessionRequest(kind="list", client_id=name))

    assert fill(call("a"), ExhaustedError) == 12
    with pytest.raises(ExhaustedError):
        client.timelines("a's", "a")
    assert fill(lambda n: client.timelines(f"{n}", "b"), ExhaustedError) == 4
    alone = Silent()
    assert fill(lambda _: alone.call_session(SessionRequest(kind="list")), ExhaustedError) == CALLS_MAX
