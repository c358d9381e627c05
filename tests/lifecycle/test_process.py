"""The engine in its own process with the real core.

The outputs are the same, and each request ends exactly once, whatever is killed at any time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from children import engine_processes
from engine_client import SETTINGS, Client, sizing
from golden import FOLDER, load_golden
from llaisys import LLM
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine import process
from llaisys.engine.process import RestartLimit
from llaisys.errors import EngineDeadError, LlaisysError, RejectedError
from llaisys.outputs import FinishReason
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from serving import END_S, long_model
from waiting import until

SEED = 20
# `make test-long` kills more often.
N_KILLS, N_STREAMS = int(os.environ.get("KILLS", "6")), 32


@pytest.fixture
def made() -> Iterator[Client]:
    client = Client()
    yield client
    client.client.close()
    assert engine_processes() == []


def test_the_outputs_equal_those_of_an_engine_in_this_process() -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=24),
        SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12, stop=["a"]),
    ]
    asks = [(prompt, each) for prompt in load_golden().prompts for each in params]
    completions, vectors = [], []
    for engine_process in (False, True):
        with LLM(**SETTINGS, engine_process=engine_process) as llm:
            outputs = llm.generate([prompt for prompt, _ in asks], [each for _, each in asks])
            assert llm.reset_prefix_cache()
            (again,) = llm.generate(asks[0][0], params[0])
            assert again.num_cached_tokens == 0
            vectors.append([each.outputs for each in llm.embed(load_golden().prompts)])
        # Cached tokens and times depend on the state at the arrival.
        without = {"num_cached_tokens": 0, "queued_s": 0.0, "metrics": None}
        completions.append([replace(output, **without) for output in outputs])
    assert completions[0] == completions[1]
    assert vectors[0] == vectors[1]
    assert completions[1][0].outputs[0].token_ids == load_golden().greedy[0]


async def test_kill_9_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 32 open streams ends once, the next request is served, and one child is running."""
    monkeypatch.setattr(process, "RESTARTS_MAX", N_KILLS)
    service = await AsyncLLM.start(Config(**SETTINGS, engine_process=True))
    chance = random.Random(SEED)
    prompt = load_golden().prompts[0]
    n_cut = 0
    try:
        for turn in range(N_KILLS):
            (child,) = engine_processes()
            kill_at, n_tokens = chance.randrange(400), 0
            ends: list[str | BaseException] = []

            async def stream(name: str) -> None:
                nonlocal n_tokens
                params = SamplingParams(
                    temperature=0.0, max_tokens=90, ignore_eos=True, output_kind=RequestOutputKind.DELTA
                )
                try:
                    async for delta in service.generate(prompt, params, name):
                        if delta.finished:
                            ends.append(str(delta.outputs[0].finish_reason))  # noqa: B023 -- awaited in the turn
                        n_before, n_tokens = n_tokens, n_tokens + len(delta.outputs[0].token_ids)
                        if n_before <= kill_at < n_tokens:  # noqa: B023 -- as above
                            child.kill()  # noqa: B023 -- as above
                except LlaisysError as error:
                    ends.append(error)  # noqa: B023 -- as above

            await asyncio.gather(*(stream(f"{turn}-{i}") for i in range(N_STREAMS)))
            assert n_tokens > kill_at, f"seed {SEED}, turn {turn}: nothing was killed"
            assert len(ends) == N_STREAMS, f"seed {SEED}, turn {turn}"
            assert all(end == "length" or isinstance(end, EngineDeadError) for end in ends), ends
            n_cut += any(isinstance(end, EngineDeadError) for end in ends)
            assert service._collectors == {}
            child.wait()
            # If the last stream ended before the kill, the service has yet to notice it.
            await until(lambda: bool(engine_processes()) and service.is_alive())
            params = SamplingParams(
                temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            ids = [i async for d in service.generate(prompt, params, "next") for i in d.outputs[0].token_ids]
            assert ids == load_golden().greedy[0]
    finally:
        await service.close()
    assert n_cut > 0, f"seed {SEED}: all streams had ended before every kill"
    assert engine_processes() == []


def test_a_child_that_keeps_dying_is_no_longer_restarted(made: Client) -> None:
    for _ in range(process.RESTARTS_MAX):
        made.submit_to_a_stopped_child("open").kill()
        end = made.end_of("open")
        assert isinstance(end.error, EngineDeadError)
        assert "SIGKILL" in str(end.error)
        made.back()
    made.submit_to_a_stopped_child("open").kill()
    assert "restarted 3 times, which is the limit" in str(made.end_of("open").error)
    with pytest.raises(EngineDeadError, match="which is the limit"):
        made.submit("late")
    assert made.client.error is not None


def test_restarts_are_counted_within_ten_minutes() -> None:
    now_s = 0.0
    restarts = RestartLimit(lambda: now_s)
    assert [restarts.allow_restart() for _ in range(4)] == [True, True, True, False]
    now_s = 599.0
    assert not restarts.allow_restart()
    now_s = 600.0
    assert [restarts.allow_restart() for _ in range(4)] == [True, True, True, False]


def test_a_malformed_message_ends_the_child_and_not_the_parent(made: Client) -> None:
    connection = made.client._connection
    assert isinstance(connection, process._EngineProcess)
    child = made.child()
    child.suspend()
    connection._channel.send(b"\xc1")
    made.submit("open")  # after the message, because the child could complete it first
    child.resume()
    end = made.end_of("open")
    assert isinstance(end.error, EngineDeadError)
    assert "exit code 70" in str(end.error)
    made.back()


def test_a_child_that_sends_an_invalid_message_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = (
        "import sys, time; sys.path[:] = {}; from llaisys.ipc import Channel;"
        "Channel.inherited({}).send(b'hello'); time.sleep(600 + {})"
    )
    monkeypatch.setattr(process, "_BOOT", boot)
    with pytest.raises(EngineDeadError, match="sent an invalid message"):
        Client()
    assert engine_processes() == []


def test_the_error_of_loading_a_model_is_raised(tmp_path: Path) -> None:
    good = sizing()
    bad = replace(good, settings=replace(good.settings, path=tmp_path / "gone"))
    with pytest.raises(RejectedError, match="gone"):
        Client(bad)
    assert engine_processes() == []


def test_a_changed_package_on_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "package_version", lambda: "0.0.0")
    with pytest.raises(RejectedError, match=r"on disk has changed from version 0\.0\.0"):
        Client()


def test_close_ends_what_is_open_once_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    folder = long_model(tmp_path)
    gc.collect()
    n_fds = psutil.Process().num_fds()
    made = Client(sizing(folder, num_kv_cells=65536))
    made.submit("open", max_tokens=60_000)
    made.client.close()
    made.client.close()
    assert "shutting down" in str(made.end_of("open").error)
    assert made.outputs.empty()
    with pytest.raises(EngineDeadError, match="shutting down"):
        made.submit("late")
    assert engine_processes() == []
    del made
    gc.collect()
    assert psutil.Process().num_fds() == n_fds


PARENT = f"""
import sys
from llaisys import LLM, SamplingParams
with LLM({str(FOLDER)!r}, engine_process=True, num_kv_cells=4096) as llm:
    print(llm._engine.client._connection.pid, flush=True)
    while sys.argv[1] == "streaming":
        llm.generate("Hello", SamplingParams(max_tokens=400, ignore_eos=True))
    sys.stdin.read()
"""
# The socket stays open in a third process, so only the parent-death signal ends the child.
HELD_OPEN = """
import socket, subprocess, sys
from llaisys.engine import process
ours, theirs = socket.socketpair()
child, _ = process._spawn(theirs)
theirs.close()
subprocess.Popen(["sleep", "600"], pass_fds=[ours.fileno()], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("script", "argument"),
    [(PARENT, "idle"), (PARENT, "streaming"), (HELD_OPEN, "")],
    ids=["idle", "streaming", "socket held open"],
)
def test_kill_9_of_the_parent_leaves_no_child(script: str, argument: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, argument]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        others = [each for each in psutil.Process(parent.pid).children() if each != child]
        parent.kill()
        child.wait(timeout=END_S)
        for other in others:
            other.kill()


def test_the_end_of_its_socket_ends_a_child() -> None:
    """Also before it has received Start."""
    ours, theirs = socket.socketpair()
    with theirs:
        child, log_pipe = process._spawn(theirs)
    ours.close()
    assert child.wait(timeout=END_S) == 70
    os.close(log_pipe)


def test_a_child_ignores_signals_for_the_parent(made: Client) -> None:
    made.submit("open", max_tokens=100)
    for number in (signal.SIGINT, signal.SIGTERM):
        made.child().send_signal(number)
    assert made.end_of("open").finish_reason is FinishReason.LENGTH
