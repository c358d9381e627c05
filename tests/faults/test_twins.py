"""Negative tests on the real core: each check alone detects a release without effect.

The snapshot names what leaked.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from fakes.asks import ask, limits
from golden import FOLDER
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.request import BrokenInvariant
from llaisys.engine.worker import Worker
from llaisys.outputs import FinishReason
from waiting import DEADLINE_S

# Eight leaked requests leave no id and no cells for a ninth.
N_IDS, N_COMPUTED = 8, 4


class Leaking:
    """An engine with eight ids; `leak` runs a short request whose id is never returned."""

    def __init__(self, core: ModuleType) -> None:
        n_cells = (N_IDS + 1) * N_COMPUTED
        bounds = limits(
            max_num_seqs=N_IDS, n_cells=n_cells, max_model_len=n_cells, enable_prefix_caching=False
        )
        self.core = core
        self.context = core.Context(
            str(FOLDER),
            n_cells=bounds.n_cells,
            n_seq_max=N_IDS,
            n_batch=8,
            max_model_len=bounds.max_model_len,
            n_threads=1,
            lifo=True,
            nan_fill=True,
        )
        self.engine = LLMEngine(Executor(Worker(self.context, core.SamplerSpec)), bounds, 0)
        self.n_asked = 0

    def submit(self) -> None:
        self.n_asked += 1
        self.engine.submit(ask(f"{self.n_asked}", max_tokens=2))

    def step(self) -> list[Any]:
        return self.engine.step(1000.0)

    def leak(self, n: int) -> None:
        for _ in range(n):
            self.submit()
            self.core.set_fault("seq.release", "leak")
            while self.engine.has_work():
                self.step()

    def leaked(self) -> list[int]:
        """Return the acquired ids of the snapshot, while no request runs."""
        assert not self.engine.requests.running
        return [seq_id for seq_id, _, _ in self.context.snapshot().sequences]


@pytest.fixture
def world(core: ModuleType) -> Iterator[Leaking]:
    made = Leaking(core)
    yield made
    made.context.close()


def switch_off(world: Leaking, monkeypatch: pytest.MonkeyPatch, *alarms: str) -> None:
    for alarm in alarms:
        monkeypatch.setattr(world.engine, alarm, lambda *_: None)


def test_the_invariant_check_fires_when_the_engine_becomes_idle(world: Leaking) -> None:
    with pytest.raises(BrokenInvariant, match="7 sequence ids are free, 0 run"):
        world.leak(1)
    assert len(world.leaked()) == 1


def test_the_admission_check_fires_in_the_step_that_should_admit_the_ninth(
    world: Leaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(world, monkeypatch, "check")
    world.leak(N_IDS)
    world.submit()
    (output,) = world.step()
    assert output.finish_reason is FinishReason.ERROR
    assert "no KV cells" in str(output.error)
    world.submit()
    with pytest.raises(BrokenInvariant, match="0 requests run, 1 wait"):
        world.step()
    assert len(world.leaked()) == N_IDS


def test_v2_fires_without_the_other_checks(world: Leaking, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off(world, monkeypatch, "check")
    world.leak(N_IDS)
    monkeypatch.setattr(LLMEngine, "_fail_stuck", lambda *_: None)
    world.submit()
    watchdog = world.core.Watchdog(world.context.progress(), period_s=0.01, admit_s=0.05)
    assert world.step() == [None]
    stats = world.engine.stats()
    watchdog.report(waiting=stats.num_waiting, running=stats.num_running)
    readable, _, _ = select.select([watchdog], [], [], DEADLINE_S)
    assert readable, "no stall was detected"
    assert watchdog.stall_reason == "V2"
    watchdog.close()
    assert len(world.leaked()) == N_IDS
