"""The watchdog thread polls, reports each stall once and blocks nothing. Rust tests cover stall reasons."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden import FOLDER
from llaisys import _core
from llaisys.errors import RejectedError
from runner import Runner

TESTS = Path(__file__).parents[1]
TOO_LONG_S = 60  # upper bound of every wait


@pytest.fixture
def progress() -> Iterator[_core.Progress]:
    with Runner(FOLDER) as runner:
        yield runner.context.progress()


def read_report(watchdog: _core.Watchdog) -> bytes:
    readable, _, _ = select.select([watchdog], [], [], TOO_LONG_S)
    assert readable, "no stall reason"
    with open(watchdog.fileno(), "rb", closefd=False) as pipe:
        return pipe.read(1)


def test_progress_counts_steps_rows_and_sequences() -> None:
    with Runner(FOLDER) as runner:
        progress = runner.context.progress()
        seq = runner.context.seq_acquire()
        runner.extend(seq, [1, 2, 3], 0)
        with pytest.raises(RejectedError):
            runner.extend(seq, [1], 7)
        counts = (progress.n_steps_begun, progress.n_steps_ended, progress.n_rows_committed)
        assert counts == (2, 2, 3)
        assert progress.n_layers_begun > 0
        runner.context.seq_release(seq)
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(progress.n_sequences_released))
        thread.start()
        thread.join()
        assert (progress.n_sequences_acquired, seen) == (1, [1])
    assert progress.n_rows_committed == 3, "readable after the context is closed"


def test_waiting_without_admission_is_reported_once(progress: _core.Progress) -> None:
    watchdog = _core.Watchdog(progress, period_s=0.01, admit_s=0.05)
    assert watchdog.stall_reason is None
    watchdog.report(waiting=3, running=0)
    assert read_report(watchdog) == b"2"
    assert watchdog.stall_reason == "V2"
    watchdog.close()
    watchdog.close()
    with open(watchdog.fileno(), "rb", closefd=False) as pipe:
        assert pipe.read() == b"", "the watchdog thread has closed its end of the pipe"


def test_a_missed_deadline_and_a_blocked_loop_are_reported(progress: _core.Progress) -> None:
    late = _core.Watchdog(progress, period_s=0.01, deadline_s=0.05, commit_s=1000)
    late.report(waiting=1, running=1, seconds_to_deadline=0.01)
    assert read_report(late) == b"4"
    late.close()
    blocked = _core.Watchdog(progress, period_s=0.01, late_s=1000, loop_s=0.05)
    blocked.beat()
    assert read_report(blocked) == b"5"
    blocked.close()


def test_each_late_heartbeat_is_reported_and_is_no_stall(progress: _core.Progress) -> None:
    late = _core.Watchdog(progress, period_s=0.01, late_s=0.05, loop_s=1000)
    for _ in range(3):
        late.beat()
        assert read_report(late) == b"L"
    assert late.stall_reason is None
    late.close()
    with open(late.fileno(), "rb", closefd=False) as pipe:
        assert pipe.read() == b"", "one report per late heartbeat"


@pytest.mark.parametrize("acknowledged", [True, False])
def test_an_unacknowledged_stall_ends_the_process(acknowledged: bool) -> None:
    """This holds even while the main thread keeps the GIL, here inside one very long C call.

    No exit handler runs, because it could wait for the stalled thread; the handler here exits with code 4.
    """
    code = f"""
import ctypes, re, sys
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc._exit, ctypes.c_void_p(4), None)
sys.path.insert(0, {str(TESTS)!r})
from golden import FOLDER
from runner import Runner
from llaisys import _core
runner = Runner(FOLDER)
watchdog = _core.Watchdog(runner.context.progress(), period_s=0.01, admit_s=0.05, exit_after_s=0.1)
watchdog.report(waiting=1, running=0)
if {acknowledged}:
    open(watchdog.fileno(), "rb", closefd=False).read(1)
    watchdog.acknowledge()
    watchdog.close()
    libc._exit(3)
re.match("(a+)+$", "a" * 60 + "b")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode == (3 if acknowledged else 70), done.stderr
    assert (b"V2; ending with exit code" in done.stderr) is not acknowledged


@pytest.mark.parametrize("setting", ["period_s", "admit_s", "late_s", "step_factor", "exit_after_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), 1e9])
def test_invalid_durations_are_rejected(progress: _core.Progress, setting: str, value: float) -> None:
    with pytest.raises(RejectedError, match=setting):
        _core.Watchdog(progress, **{setting: value})
