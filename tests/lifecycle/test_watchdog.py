"""Stalls that the watchdog of the core detects, and their effect on a service, a server and a child."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from children import engine_processes
from golden import FOLDER
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.engine import LLMEngine
from llaisys.errors import EngineDeadError
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from serving import END_S, READY, environment, long_model
from sse import events
from waiting import DEADLINE_S, block_until, until

# The watchdog waits for 20 times the predicted time of a full step, which one slow prompt can make minutes.
SMALL_STEPS = 16
SETTINGS: dict[str, Any] = {
    "model": str(FOLDER),
    "dtype": "float32",
    "num_kv_cells": 1024,
    "max_num_batched_tokens": SMALL_STEPS,
}
SCRIPT = Path(__file__).with_name("stuck.py")
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


async def stall_error_of(service: AsyncLLM) -> str:
    """Return the error that ends all of eight open streams."""

    async def stream(name: str) -> None:
        async for _ in service.generate([1, 2, 3], LONG, name):
            pass

    ends = await asyncio.gather(*(stream(f"{i}") for i in range(8)), return_exceptions=True)
    assert all(isinstance(end, EngineDeadError) for end in ends), ends
    (text,) = {str(end) for end in ends}
    assert service.is_stuck()
    assert not service.is_alive()
    assert not service.is_ready()
    await service.close()
    return text


async def test_v3_steps_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    release, n_steps, step = threading.Event(), 0, LLMEngine.step

    def stops(engine: LLMEngine, now_s: float) -> Any:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 20:
            release.wait()
        return step(engine, now_s)

    monkeypatch.setattr(LLMEngine, "step", stops)
    # The watchdog counts a pause of the whole machine as up to one second, so a shorter window could be a V1.
    service = await AsyncLLM.start(Config(**SETTINGS, watchdog_window_s=2.0))
    try:
        assert "V3" in await stall_error_of(service)
    finally:
        release.set()


async def test_v2_no_request_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLMEngine, "step", lambda *_: [])
    service = await AsyncLLM.start(Config(**SETTINGS, watchdog_window_s=0.6))
    assert "V2" in await stall_error_of(service)


class LateReports(logging.Handler):
    """Keeps all reports of a late event loop, and sets `arrived` at the first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.arrived, self.reports = threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.reports.append(record.getMessage())
        self.arrived.set()


@pytest.mark.parametrize("engine_process", [False, True])
async def test_a_loop_that_is_late_is_reported_and_nothing_ends(engine_process: bool) -> None:
    service = await AsyncLLM.start(Config(**SETTINGS, watchdog_window_s=12.0, engine_process=engine_process))
    late_reports, log = LateReports(), logging.getLogger("llaisys.engine.watchdog")
    log.addHandler(late_reports)
    try:
        service.beat()
        assert late_reports.arrived.wait(DEADLINE_S)  # blocks the event loop until it is reported
        service.beat()
        short = SamplingParams(
            temperature=0.0, max_tokens=3, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        outputs = []
        async for output in service.generate([1, 2, 3], short, "a"):
            service.beat()
            outputs.append(output)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 3
        assert service.is_alive()
        assert not service.is_stuck()
    finally:
        log.removeHandler(late_reports)
        await service.close()
    report = late_reports.reports[0]  # on a busy machine the loop may be late again
    assert report.startswith("the event loop is late: ")
    assert "late_reports.arrived.wait(DEADLINE_S)" in report, "the stack shows what blocks it"


@pytest.mark.parametrize("engine_process", [False, True])
async def test_v5_an_event_loop_that_stops(engine_process: bool) -> None:
    service = await AsyncLLM.start(Config(**SETTINGS, watchdog_window_s=3.0, engine_process=engine_process))
    stream = service.generate([1, 2, 3], LONG, "a")
    await anext(stream)
    service.beat()
    assert service._client is not None
    client = service._client
    await until(lambda: client.error is not None)
    assert service.is_stuck()
    assert not service.is_alive()
    with pytest.raises(EngineDeadError, match="V5"):
        await anext(service.generate([1], LONG, "b"))
    await stream.aclose()  # type: ignore[attr-defined]  # a generator
    await service.close()
    assert not engine_processes()


@contextmanager
def stuck_server(folder: Path, how: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server. Its window is short for a stuck event loop, else long enough for an admission."""
    window = ("--watchdog-window-s", "2" if how == "loop" else "12")
    arguments = ["serve", str(long_model(folder)), "--port", "0", "--num-kv-cells", "65536"]
    arguments += ["--max-num-batched-tokens", f"{SMALL_STEPS}"]
    env = {**environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(folder / "mark"), how, *arguments, *window, *flags]
    # The log goes to a file, because a full unread pipe would drop lines.
    with (
        (folder / "log").open("w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env) as process,
    ):
        try:
            assert process.stdout is not None
            ready = READY.match(process.stdout.readline())
            assert ready is not None
            with httpx.Client(base_url=ready[2], timeout=None) as http:
                yield process, http
        finally:
            process.kill()


def log_of(folder: Path) -> str:
    return (folder / "log").read_text("utf-8")


BODY = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}


def test_a_stuck_engine_ends_its_server_with_70(tmp_path: Path) -> None:
    with stuck_server(tmp_path, "thread") as (process, http):
        raw = http.post("/v1/completions", json=BODY).content
        *_, error, done = events(raw)
        assert (error["error"]["code"], done) == ("engine_dead", "[DONE]")
        process.wait(timeout=END_S)
        log = log_of(tmp_path)
        assert process.returncode == 70, log
    assert re.search(r"the engine is stuck \(V3\): .*the steps", log)
    assert re.search(r"request 0: Running", log)
    assert "in stops" in log, "the stacks show where it is stuck"
    assert "Hello" not in log


@pytest.mark.parametrize("flags", [(), ("--engine-process",)])
def test_a_stuck_event_loop_ends_its_server_with_70(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with stuck_server(tmp_path, "loop", *flags) as (process, _):
        process.wait(timeout=END_S)
        log = log_of(tmp_path)
        assert process.returncode == 70, log
    assert re.search(r"the engine is stuck \(V5\): the event loop", log)
    assert log.count("the event loop is late") == 1


def test_a_stuck_engine_process_is_replaced(tmp_path: Path) -> None:
    with stuck_server(tmp_path, "process", "--engine-process") as (process, http):
        *_, error, done = events(http.post("/v1/completions", json=BODY).content)
        assert (error["error"]["code"], done) == ("engine_dead", "[DONE]")
        block_until(lambda: process.poll() is not None or http.get("/ready").status_code == 200)
        again = http.post("/v1/completions", json={**BODY, "max_tokens": 40, "stream": False})
        assert again.json()["usage"]["completion_tokens"] == 40
        process.terminate()
        process.wait(timeout=END_S)
        log = log_of(tmp_path)
        assert process.returncode == 0, log
    assert "the engine is stuck (V3)" in log
    assert "ended with exit code 70; restarting it" in log
