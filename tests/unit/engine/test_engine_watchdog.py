"""A stalled engine: the log names the resource and every open request ends once.

Nothing waits for the engine.
"""

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


class BlockedClient:
    """A watched engine that blocks inside a decode until `go` is set."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.failed, self.inside, self.go = threading.Event(), threading.Event(), threading.Event()
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

        def wait_then_decode(*arrays: Any) -> Any:
            self.inside.set()
            self.go.wait(30)
            return decode(*arrays)

        context.decode = wait_then_decode  # type: ignore[method-assign]
        return LLMEngine(Executor(Worker(context, core.SamplerSpec)), bounds, 0)  # type: ignore[arg-type]

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self.outputs += outputs
        if any(output.error is not None for output in outputs):
            self.failed.set()


@pytest.fixture
def blocked() -> Iterator[BlockedClient]:
    made = BlockedClient()
    yield made
    made.go.set()
    made.client.close()


@pytest.mark.parametrize(
    ("reason", "resource"),
    [
        ("V1", "the core"),
        ("V2", "sequence ids and KV cells"),
        ("V3", "the steps"),
        ("V4", "the queue"),
        ("V5", "the event loop"),
    ],
)
def test_a_stall_ends_every_request_once_without_waiting_for_the_engine(
    blocked: BlockedClient, reason: str, resource: str, caplog: pytest.LogCaptureFixture
) -> None:
    blocked.client.submit(ask("runs", prompt=[7, 7, 7]))
    assert blocked.inside.wait(30)
    blocked.client.submit(ask("waits"))
    with caplog.at_level(logging.CRITICAL):
        blocked.watchdog.report_stall(reason)
        assert blocked.failed.wait(30)
    assert sorted(output.request_id for output in blocked.outputs) == ["runs", "waits"]
    assert all(isinstance(o.error, EngineDeadError) and reason in str(o.error) for o in blocked.outputs)
    assert all(o.last for o in blocked.outputs)
    assert blocked.client.is_stuck
    assert blocked.client.error is not None
    with pytest.raises(EngineDeadError, match=reason):
        blocked.client.submit(ask("late"))
    blocked.client.close()  # the engine thread is still inside the decode
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"stuck ({reason})" in message
    assert resource in message.splitlines()[0]
    for line in (
        "acquired by running requests: 1",
        "request 0: Running",
        "queue: 0",
        "KV cells: 256",
        "newest step",
    ):
        assert line in message
    blocked.go.set()
    blocked.client._loop._thread.join(30)
    assert len(blocked.outputs) == 2, "no output follows the error"


def test_progress_is_reported_after_each_iteration(blocked: BlockedClient) -> None:
    blocked.go.set()
    done = threading.Event()
    blocked.deliver = lambda outputs: done.set() if outputs[-1].last else None  # type: ignore[method-assign]
    blocked.client._deliver = blocked.deliver
    blocked.client.submit(ask("a", max_tokens=3))
    assert done.wait(30)
    blocked.client.close()
    assert {k: blocked.watchdog.reports[0][k] for k in ("waiting", "running")} == {"waiting": 0, "running": 1}
    assert blocked.watchdog.reports[-1]["running"] == 0
    blocked.client.beat()
    assert blocked.watchdog.n_beats == 1
    assert not blocked.client.is_stuck


def test_all_watchdog_windows_follow_one_setting(blocked: BlockedClient) -> None:
    assert blocked.watchdog.windows == {
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
    made = BlockedClient()
    threads = [thread for thread in threading.enumerate() if thread.name == "llaisys-watchdog"]
    assert threads
    made.client.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not made.watch.is_stuck


def test_a_late_event_loop_is_logged_with_its_stack_and_ends_no_request(blocked: BlockedClient) -> None:
    """Each delay is logged once, and a later stall is still detected."""
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(records)
    logging.getLogger("llaisys.engine.watchdog").addHandler(handler)
    try:
        blocked.client.submit(ask("runs"))
        for _ in range(2):
            blocked.client.beat()
            blocked.watchdog.report_late_loop()
            record = records.get(timeout=30)
            assert record.levelname == "WARNING"
            assert "the event loop is late" in record.getMessage()
            assert "after 30 s" in record.getMessage()
            assert "in test_a_late_event_loop_is_logged_with_its_stack" in record.getMessage()
        assert records.empty()
        assert not blocked.client.is_stuck
        assert blocked.outputs == []
        blocked.watchdog.report_stall("V5")
        assert blocked.failed.wait(30)
        assert blocked.client.is_stuck
    finally:
        logging.getLogger("llaisys.engine.watchdog").removeHandler(handler)


def test_an_event_loop_is_watched_without_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[EngineDeadError] = []
    failed = threading.Event()

    def on_stall(error: EngineDeadError) -> None:
        errors.append(error)
        failed.set()

    watch = EngineWatchdog(30.0, exits=False)
    watch.start_for_event_loop(on_stall)
    watch.beat()
    assert core.Watchdog.newest.n_beats == 1
    assert core.Watchdog.newest.windows["exit_after_s"] is None
    with caplog.at_level(logging.CRITICAL):
        core.Watchdog.newest.report_stall("V5")
        assert failed.wait(30)
    assert watch.is_stuck
    assert [str(error) for error in errors] == ["the engine is stuck: V5"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "stuck (V5): the event loop" in message
    assert "in the engine process" in message
    watch.stop()
