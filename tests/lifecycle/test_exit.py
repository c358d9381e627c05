"""A program with an engine exits cleanly in every way: without a crash, hang, panic or leftover process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from serving import END_S, long_model

SCRIPT = Path(__file__).with_name("exits.py")
FORMS = ("thread", "process")
# Python ends with the signal if nothing catches a Ctrl-C.
CODES = {"sys.exit": {3}, "exception": {1}, "SIGINT x2": {-signal.SIGINT, 1, 130}}
# Ways to end, by the work in progress. Without work, an exception and `sys.exit` do not differ from the last
# line, and the thread that closes does not matter. `close twice` also continues to the last line.
OPEN = ("no close", "sys.exit", "exception", "SIGINT x2", "close twice", "close from another thread", "fork")
WAYS = {"idle": ("no close", "SIGINT x2", "close twice", "fork"), "streaming": OPEN, "async": OPEN}
# Identifies the programs of this run and their children among all processes.
MARK = f"{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(long_model(tmp_path_factory.mktemp("exit")))


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Wait until the engine process of an ended program has ended."""
    yield
    for each in psutil.process_iter(["environ"]):
        if (each.info["environ"] or {}).get("EXIT_TEST") == MARK:
            each.wait(timeout=END_S)


@pytest.mark.parametrize(("work", "how"), [(work, how) for work, hows in WAYS.items() for how in hows])
def test_a_program_exits_cleanly(model: str, work: str, how: str) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONFAULTHANDLER": "1",
        "EXIT_TEST": MARK,
    }
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), how, work, model, form],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=env,
                )
            )
            for form in FORMS
        ]
        for program in programs:
            stack.callback(program.kill)
        for program in programs:
            if how == "SIGINT x2":
                assert program.stdout is not None
                assert program.stdout.readline() == "waiting\n"
                program.send_signal(signal.SIGINT)
                program.send_signal(signal.SIGINT)
        for program, form in zip(programs, FORMS, strict=True):
            _, errors = program.communicate(timeout=END_S)
            assert program.returncode in CODES.get(how, {0}), (form, errors)
            for bad in ("PanicException", "panicked", "Fatal Python error"):
                assert bad not in errors, (form, errors)
            # The second Ctrl-C may come during Python's own shutdown, which reports that it ignores it.
            assert how == "SIGINT x2" or "Exception ignored" not in errors, (form, errors)
