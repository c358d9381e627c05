"""EngineClient: shares of open requests and session calls, and messages that cannot be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fakes.asks import ask, limits
from llaisys.engine.client import CALLS_MAX, EngineClient
from llaisys.engine.sessions.manager import SessionRequest
from llaisys.errors import EngineDeadError, ExhaustedError, QueueFullError


class Silent(EngineClient):
    """A client of an engine that accepts everything and never replies."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(limits(**changes), lambda _: None, None)
        self._connection = self  # type: ignore[assignment]
        self.sent: list[Any] = []
        self.error_of_send: Exception | None = None
        self.dies = False
        self.open_after_death: dict[str, str] = {}

    def send(self, message: Any) -> None:
        if self.error_of_send is not None:
            raise self.error_of_send
        if self.dies:
            self._end_all(EngineDeadError("a panic"))
            self._open |= self.open_after_death
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


def test_a_message_that_cannot_be_sent_leaves_nothing_open() -> None:
    client = Silent()
    client.error_of_send = TypeError("not plain data")
    with pytest.raises(TypeError):
        client.submit(ask("a"))
    with pytest.raises(TypeError):
        client.call_session(SessionRequest(kind="list"))
    assert (client._open, client._calls) == ({}, {})


def test_a_request_sent_to_an_engine_that_dies_ends_once() -> None:
    """The engine dies inside `send`, before or after it has ended all open requests."""
    client = Silent()
    client.dies = True
    client.submit(ask("ended"))
    assert client._open == {}
    client = Silent()
    client.dies, client.open_after_death = True, {"missed": ""}
    with pytest.raises(EngineDeadError, match="a panic"):
        client.submit(ask("missed"))
    assert client._open == {}
    with pytest.raises(EngineDeadError, match="a panic"):
        client.call_session(SessionRequest(kind="list"))
