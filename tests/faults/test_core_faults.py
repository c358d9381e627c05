"""Fault points through the compiled binding: the class of the exception, and what works after it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import llaisys
from golden import FOLDER
from llaisys.errors import CoreFaultError, EngineDeadError, RejectedError

pytestmark = pytest.mark.two_cpus

PROMPT = [5, 6, 7, 8, 9]
LOST = ("kv.change", "kv.prepare", "kv.commit")


def context_of(core: ModuleType, **settings: Any) -> Any:
    shape = {"n_cells": 128, "n_seq_max": 4, "n_batch": 4, "max_model_len": 128, "n_threads": 2}
    return core.Context(str(FOLDER), dtype="float32", **{**shape, **settings})


def decode(context: Any, seq: int, tokens: list[int], start: int) -> int:
    n = len(tokens)
    wants = np.zeros(n, np.uint8)
    wants[-1] = 1
    out = context.decode(
        np.array(tokens, np.int32),
        np.arange(start, start + n, dtype=np.int32),
        np.ones(n, np.int32),
        np.full(n, seq, np.int64),
        wants,
    )
    return int(out.token_ids[0])


def step_points(core: ModuleType) -> list[str]:
    """Return the points that one decode passes."""
    context = context_of(core)
    seq = context.seq_acquire()
    before = {point: core.fault_hits(point) for point in core.fault_points()}
    decode(context, seq, PROMPT, 0)
    return [point for point, n in before.items() if core.fault_hits(point) > n]


def test_every_fault_of_a_step_has_its_class_and_the_next_step_is_right(core: ModuleType) -> None:
    good = context_of(core)
    seq = good.seq_acquire()
    want = [decode(good, seq, PROMPT, 0), decode(good, seq, [1], len(PROMPT))]
    points = step_points(core)
    assert set(LOST) - {"kv.change"} < set(points)
    for point in points:
        for action in ("error", "panic"):
            context = context_of(core)
            seq = context.seq_acquire()
            try:
                core.set_fault(point, action)
            except RejectedError:
                continue
            before = context.digest() if point not in LOST else None
            with pytest.raises(EngineDeadError if point in LOST else CoreFaultError, match=point):
                decode(context, seq, PROMPT, 0)
            if point in LOST:
                with pytest.raises(EngineDeadError, match="broken by an earlier failure"):
                    context.check_integrity()
                continue
            assert context.digest() == before
            assert [decode(context, seq, PROMPT, 0), decode(context, seq, [1], len(PROMPT))] == want
            context.close()


def test_a_panic_during_a_change_ends_the_context(core: ModuleType) -> None:
    context = context_of(core)
    seq = context.seq_acquire()
    core.set_fault("kv.change", "panic")
    with pytest.raises(EngineDeadError, match=r"panicked.*kv\.change"):
        context.seq_release(seq)
    with pytest.raises(EngineDeadError, match="broken by an earlier failure"):
        context.seq_acquire()
    context.close()


def test_the_nth_pass_fails_once(core: ModuleType) -> None:
    context = context_of(core)
    seq = context.seq_acquire()
    core.set_fault("decode.begin", "error", 3)
    for position in (0, 1):
        decode(context, seq, [1], position)
    with pytest.raises(CoreFaultError):
        decode(context, seq, [1], 2)
    decode(context, seq, [1], 2)


def test_a_paused_step_has_a_stall_reason(core: ModuleType) -> None:
    """V1 on a real step: other threads run, the watchdog sees no layer, and the step continues when
    released."""
    context = context_of(core)
    seq = context.seq_acquire()
    progress = context.progress()
    core.set_fault("decode.layer", "pause", 2)
    watchdog = core.Watchdog(progress, period_s=0.01, step_s=0.05)

    def resume() -> None:
        with open(watchdog.fileno(), "rb", closefd=False) as pipe:
            assert pipe.read(1) == b"1"
        core.set_fault("decode.layer", "off")

    waiter = threading.Thread(target=resume)
    waiter.start()
    decode(context, seq, PROMPT, 0)
    waiter.join()
    assert watchdog.stall_reason == "V1"
    watchdog.close()
    assert progress.n_steps_begun == progress.n_steps_ended == 1


def test_unknown_points_and_actions_are_rejected(core: ModuleType) -> None:
    for arguments in (
        ("nowhere", "panic"),
        ("decode.layer", "error"),
        ("kv.node_attach", "leak"),
        ("kv.node_attach", "bang"),
    ):
        with pytest.raises(RejectedError, match=arguments[0]):
            core.set_fault(*arguments)
    with pytest.raises(RejectedError, match="nowhere"):
        core.fault_hits("nowhere")


def test_the_shipped_core_has_no_fault_points(core: ModuleType) -> None:
    assert hasattr(core, "set_fault")
    (shipped,) = Path(llaisys.__file__).parent.glob("_core*.so")
    assert b"set_fault" not in shipped.read_bytes()
