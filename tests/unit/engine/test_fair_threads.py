"""Work of several clients on few threads."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from llaisys.engine.fair_threads import FairThreads


def test_clients_take_turns() -> None:
    threads, order = FairThreads(1, "test"), list[str]()
    begun, gate = threading.Event(), threading.Event()
    threads.submit("a", lambda: begun.set() or gate.wait())  # type: ignore[func-returns-value]
    begun.wait()
    works = [
        threads.submit(name[0], lambda name=name: order.append(name))  # type: ignore[misc]
        for name in ("a1", "a2", "a3", "b1", "b2", "c1")
    ]
    gate.set()
    for work in works:
        work.result()
    threads.close()
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_what_work_raises_is_the_submitters() -> None:
    threads = FairThreads(1, "test")

    def leave() -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        threads.submit("a", leave).result()
    assert threads.submit("a", lambda: 1).result() == 1, "the thread goes on"
    threads.close()


def test_close_waits_for_what_is_under_way_and_drops_the_rest() -> None:
    threads, begun, gate = FairThreads(1, "test"), threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        gate.wait()
        return 1

    first = threads.submit("a", work)
    queued = threads.submit("a", work)
    begun.wait()
    threading.Timer(0.01, gate.set).start()
    threads.close()
    assert first.result(timeout=0) == 1
    assert not queued.running()
    with pytest.raises(CancelledError):
        queued.result(timeout=0)
    threads.close()
