"""The Python binding of the core: argument checks, threads, forked processes, and contexts never closed.

`tests/acceptance` has the tests that decode.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import FOLDER
from llaisys import _core
from llaisys.errors import EngineDeadError, RejectedError, UnsupportedError
from runner import Runner, arrays

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"kv_dtype": "float8"}, "float8"),
        ({"n_cells": 0}, "n_cells is 0"),
        ({"n_batch": -1}, "n_batch is -1"),
        ({"n_seq_max": 257}, "1 to 256"),
        ({"max_model_len": 513}, "1 to 512"),
        ({"n_threads": 4096}, "n_threads"),
    ],
)
def test_an_invalid_setting_is_rejected_with_its_bounds(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RejectedError, match=message):
        Runner(FOLDER, **settings)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"top_k": -3}, "top_k is -3"),
        ({"seed": 2**64}, "18446744073709551616"),
        ({"stop_ids": [-1]}, "stop_ids is -1"),
        ({"logit_bias": [(2**40, 1.0)]}, "logit_bias"),
        ({"top_logprobs": -2}, "top_logprobs is -2"),
        ({"logprob_ids": [-1]}, "logprob_ids is -1"),
        ({"prompt_logprobs": -2}, "prompt_logprobs is -2"),
        ({"allowed_ids": [-1]}, "allowed_ids is -1"),
        ({"bad_words": [[1], [2, -1]]}, "bad_words is -1"),
    ],
)
def test_an_invalid_sampling_parameter_is_rejected_by_name(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(RejectedError, match=message):
        _core.SamplerSpec(**spec)


def test_bounds_that_need_the_vocabulary_are_checked_by_set_sampler() -> None:
    none = np.array([], np.int32)
    with Runner(FOLDER) as runner:
        seq = runner.context.seq_acquire()
        for spec in (
            {"temperature": -1.0},
            {"stop_ids": [600]},
            {"logit_bias": [(600, 1.0)]},
            {"top_p": 0.0},
            {"allowed_ids": [600]},
            {"bad_words": [[600]]},
            {"bad_words": [[]]},
        ):
            with pytest.raises(RejectedError, match=next(iter(spec))):
                runner.context.set_sampler(seq, _core.SamplerSpec(**spec), none, none)
        with pytest.raises(RejectedError, match="600"):
            runner.context.set_sampler(seq, _core.SamplerSpec(), np.array([600], np.int32), none)


def test_inspect_raises_the_class_of_each_error(tmp_path: Path) -> None:
    with pytest.raises(RejectedError):
        _core.inspect(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    with pytest.raises(UnsupportedError, match="Mamba"):
        _core.inspect(str(tmp_path))


def test_another_thread_may_neither_call_nor_close() -> None:
    refused: list[str] = []

    def call(runner: Runner) -> None:
        for method in (runner.context.seq_acquire, runner.context.close):
            try:
                method()
            except RejectedError as error:
                refused.append(str(error))

    with Runner(FOLDER) as runner:
        thread = threading.Thread(target=call, args=(runner,))
        thread.start()
        thread.join()
        assert len(refused) == 2
        runner.context.seq_acquire()


def test_calls_in_a_forked_process_fail_and_do_not_hang() -> None:
    """A forked process has no worker threads, so neither its calls nor its exit may wait for them."""
    with Runner(FOLDER) as runner:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                runner.context.seq_acquire()
            except EngineDeadError:
                del runner
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        runner.context.seq_acquire()


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "sys.exit(0)",
        "del runner",
        "runner.context.close(); runner.context.close()",
        "t = threading.Thread(target=lambda r: None, args=(runner,)); del runner; t.start(); t.join()",
        "runner.circle = runner; del runner",
    ],
)
def test_a_process_exits_cleanly_however_the_context_ends(end: str) -> None:
    code = f"""
import gc, sys, threading
sys.path.insert(0, {str(TESTS)!r})
from golden import FOLDER
from runner import Runner
runner = Runner(FOLDER)
runner.greedy([1, 2, 3], 4)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_decode_releases_the_gil() -> None:
    """A thread counts while the main thread is inside one long decode."""
    with Runner(FOLDER, n_cells=512, max_model_len=512, isa="scalar", n_threads=1) as runner:
        count, running, stop = [0], threading.Event(), threading.Event()

        def work() -> None:
            running.set()
            while not stop.is_set():
                count[0] += 1

        thread = threading.Thread(target=work)
        thread.start()
        running.wait()
        seq = runner.context.seq_acquire()
        rows = arrays([(1, i, [seq], 0) for i in range(512)])
        before = count[0]
        runner.context.decode(**rows)
        after = count[0]
        stop.set()
        thread.join()
        assert after > before
