"""A stalled engine: the log names the resource, every open request ends once, and nothing waits for the
engine."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from logging.handlers import QueueHandler
from typing import Any

import pytest

from fakes import core
from fakes.asks import ask, limits
from llaisys.engine.client import InprocClient
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.watchdog import EngineWatchdog
from llaisys.engine.worker import Worker
from llaisys.errors import EngineDeadError

pytestmark = pytest.mark.usefixtures("fake_core")


class Held:
    """A watched engine inside a decode, with one running and one waiting request, until `go`."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.told, self.inside, self.go = threading.Event(), threading.Event(), threading.Event()
        bounds = limits(max_num_seqs=1)
        self.watch = EngineWatchdog(30.0, exits=True)
        self.client = InprocClient(self.build, bounds, self.deliver, lambda: 1000.0, watchdog=self.watch)
        self.watchdog = core.Watchdog.newest

    def build(self) -> LLMEngine:
        bounds = limits(max_num_seqs=1)
        context = core.Context(
            "fake", n_cells=bounds.n_cells, n_seq_max=1, max_model_len=bounds.max_model_len
        )
        decode = context.decode

        def held(*arrays: Any) -> Any:
            self.inside.set()
            self.go.wait(30)
            return decode(*arrays)

        context.decode = held  # type: ignore[method-assign]
        return LLMEngine(Executor(Worker(context, core.SamplerSpec)), bounds, 0)  # type: ignore[arg-type]

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs
        if any(output.error is not None for output in outputs):
            self.told.set()


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go.set()
    made.client.close()


@pytest.mark.parametrize(
    ("verdict", "resource"),
    [
        ("V1", "the core"),
        ("V2", "sequence ids or KV cells"),
        ("V3", "the steps"),
        ("V4", "the queue"),
        ("V5", "the event loop"),
    ],
)
def test_a_stall_ends_every_request_once_and_never_waits(
    held: Held, verdict: str, resource: str, caplog: pytest.LogCaptureFixture
) -> None:
    held.client.submit(ask("runs", prompt=[7, 7, 7]))
    assert held.inside.wait(30)
    held.client.submit(ask("waits"))
    with caplog.at_level(logging.CRITICAL):
        held.watchdog.tell(verdict)
        assert held.told.wait(30)
    assert sorted(output.request_id for output in held.outputs) == ["runs", "waits"]
    assert all(isinstance(o.error, EngineDeadError) and verdict in str(o.error) for o in held.outputs)
    assert all(o.last for o in held.outputs)
    assert held.client.is_stuck
    assert held.client.error is not None
    with pytest.raises(EngineDeadError, match=verdict):
        held.client.submit(ask("late"))
    held.client.close()  # the engine is still in there
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"stuck ({verdict})" in said
    assert resource in said.splitlines()[0]
    for line in (
        "acquired by running requests: 1",
        "request 0: Running",
        "queue: 0",
        "KV cells: 256",
        "newest step",
    ):
        assert line in said
    held.go.set()
    held.client._loop._thread.join(30)
    assert len(held.outputs) == 2, "nothing follows the end"


def test_the_numbers_are_reported_after_each_iteration(held: Held) -> None:
    held.go.set()
    done = threading.Event()
    held.deliver = lambda outputs: done.set() if outputs[-1].last else None  # type: ignore[method-assign]
    held.client._deliver = held.deliver
    held.client.submit(ask("a", max_tokens=3))
    assert done.wait(30)
    held.client.close()
    assert {k: held.watchdog.reports[0][k] for k in ("waiting", "running")} == {"waiting": 0, "running": 1}
    assert held.watchdog.reports[-1]["running"] == 0
    held.client.beat()
    assert held.watchdog.n_beats == 1
    assert not held.client.is_stuck


def test_all_windows_follow_one_setting(held: Held) -> None:
    assert held.watchdog.windows == {
        "period_s": 0.25,
        "step_s": 30.0,
        "commit_s": 30.0,
        "admit_s": 5.0,
        "deadline_s": 5.0,
        "late_s": 5.0,
        "loop_s": 30.0,
        "exit_after_s": 10.0,
    }


def test_closing_stops_the_watchdog() -> None:
    made = Held()
    made.client.close()
    for thread in threading.enumerate():
        if thread.name == "llaisys-watchdog":
            thread.join(30)
    assert not made.watch.is_stuck


def test_a_late_loop_is_reported_with_its_stack_and_nothing_ends(held: Held) -> None:
    """Late twice, two reports; a stall reason still follows."""
    said: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(said)
    logging.getLogger("llaisys.engine.watchdog").addHandler(handler)
    try:
        held.client.submit(ask("runs"))
        for _ in range(2):
            held.client.beat()
            held.watchdog.tell_late()
            record = said.get(timeout=30)
            assert record.levelname == "WARNING"
            assert "the event loop is late" in record.getMessage()
            assert "after 30 s" in record.getMessage()
            assert "in test_a_late_loop_is_reported_with_its_stack" in record.getMessage()
        assert said.empty()
        assert not held.client.is_stuck
        assert held.outputs == []
        held.watchdog.tell("V5")
        assert held.told.wait(30)
        assert held.client.is_stuck
    finally:
        logging.getLogger("llaisys.engine.watchdog").removeHandler(handler)


def test_an_event_loop_is_watched_without_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    told: list[EngineDeadError] = []
    heard = threading.Event()

    def hear(error: EngineDeadError) -> None:
        told.append(error)
        heard.set()

    watch = EngineWatchdog(30.0, exits=False)
    watch.start_for_event_loop(hear)
    watch.beat()
    assert core.Watchdog.newest.n_beats == 1
    assert core.Watchdog.newest.windows["exit_after_s"] is None
    with caplog.at_level(logging.CRITICAL):
        core.Watchdog.newest.tell("V5")
        assert heard.wait(30)
    assert watch.is_stuck
    assert [str(error) for error in told] == ["the engine is stuck: V5"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "stuck (V5): the event loop" in said
    assert "in the engine process" in said
    watch.stop()
