"""The engine thread and its client: start, shutdown and failure; every request ends exactly once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import core
from fakes.asks import ask, limits
from llaisys.config import Config
from llaisys.engine import start
from llaisys.engine.client import CALLS_MAX, InprocClient
from llaisys.engine.disk_cache.disk_cache import DiskCache
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.loop import STATS_INTERVAL_S
from llaisys.engine.messages import Cancel
from llaisys.engine.request import BrokenInvariant
from llaisys.engine.start import start_engine
from llaisys.engine.worker import Worker, inspect_model
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RejectedError,
    RequestTimeoutError,
    UnsupportedError,
)
from llaisys.model_info import CudaDevice, CudaInfo
from llaisys.outputs import FinishReason
from llaisys.stats import EngineStats
from waiting import block_until


class Client:
    """A client that collects its outputs. The engine blocks before each decode while `gate` is not set."""

    def __init__(self, **changes: Any) -> None:
        self.bounds = limits(**changes)
        self.outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}
        self.now_s = 1000.0
        self.thread = ""
        self.context: core.Context | None = None
        self.engine: LLMEngine | None = None
        self.client = InprocClient(self.build, self.bounds, self.deliver, clock=lambda: self.now_s)

    def build(self) -> LLMEngine:
        self.thread = threading.current_thread().name
        context = self.context = core.Context(
            "fake",
            n_cells=self.bounds.n_cells,
            n_seq_max=self.bounds.max_num_seqs,
            max_model_len=self.bounds.max_model_len,
        )
        decode = context.decode

        def wait_then_decode(*arrays: Any) -> Any:
            self.stepping.set()
            self.gate.wait(30)
            return decode(*arrays)

        context.decode = wait_then_decode  # type: ignore[method-assign]
        self.engine = LLMEngine(Executor(Worker(context, core.SamplerSpec)), self.bounds, 0)  # type: ignore[arg-type]
        return self.engine

    def deliver(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def block(self) -> None:
        """Wait until the engine is inside a step, which continues after `gate.set()`."""
        self.gate.clear()
        self.stepping.clear()
        self.client.submit(ask("blocked", prompt=[1]))
        assert self.stepping.wait(30)

    def end_of(self, *names: str) -> list[EngineOutput]:
        """Wait for the last outputs of these requests and return them; each request has one."""
        while not self.ends.keys() >= set(names):
            output = self.outputs.get(timeout=30)
            assert output.request_id not in self.ends, "an output after the last one"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
        return [self.ends[name] for name in names]


@pytest.fixture
def made() -> Iterator[Client]:
    client = Client()
    yield client
    client.gate.set()
    client.client.close()


def test_requests_run_on_the_engine_thread(made: Client) -> None:
    for name in "abc":
        made.client.submit(ask(name))
    made.end_of(*"abc")
    assert made.tokens == dict.fromkeys("abc", core.answer([1, 2, 3], 10))
    assert made.thread == "llaisys-engine"


class ReadsStats(Client):
    """A client that reads the engine's stats with each output, `tick_s` apart."""

    def __init__(self, tick_s: float, **changes: Any) -> None:
        self.tick_s = tick_s
        self.stats: list[EngineStats] = []
        super().__init__(**changes)

    def deliver(self, outputs: list[EngineOutput]) -> None:
        self.stats += [self.client.stats()] * len(outputs)
        self.now_s += self.tick_s
        super().deliver(outputs)


@pytest.mark.parametrize(
    ("tick_s", "n_steps"),
    [
        (0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 10]),
        (0.0625, [1, 1, 3, 3, 5, 5, 7, 7, 9, 10]),
        (STATS_INTERVAL_S, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_while_a_request_continues_stats_are_made_once_per_interval(
    tick_s: float, n_steps: list[int]
) -> None:
    made = ReadsStats(tick_s)
    made.client.submit(ask("a"))
    made.end_of("a")
    made.client.close()
    assert [stats.num_steps for stats in made.stats] == n_steps
    assert (made.stats[0].num_running, made.stats[-1].num_running) == (1, 0)
    assert made.stats[-1].finished == {"length": 1}, "the stats at the end include the end"


def test_stats_are_made_when_a_waiting_request_starts() -> None:
    made = ReadsStats(0.0, max_num_seqs=1)
    made.block()
    made.client.submit(ask("a", max_tokens=2))
    made.gate.set()
    made.end_of("blocked", "a")
    made.client.close()
    first = made.stats[-2]
    assert (first.num_running, first.num_queued, first.num_submitted) == (1, 0, 2)


def test_a_request_that_can_never_run_is_rejected_by_submit(made: Client) -> None:
    with pytest.raises(ContextLengthError):
        made.client.submit(ask("a", prompt=[1] * 64))
    with pytest.raises(RejectedError, match="300"):
        made.client.submit(ask("a", prompt=[300]))


def test_an_id_in_use_is_rejected_until_its_request_ends(made: Client) -> None:
    made.block()
    made.client.cancel("blocked")
    with pytest.raises(RejectedError, match="in use"):
        made.client.submit(ask("blocked"))
    made.gate.set()
    assert made.end_of("blocked")[0].finish_reason is FinishReason.ABORT
    made.ends.clear()
    made.tokens.clear()
    made.client.submit(ask("blocked"))
    made.end_of("blocked")
    assert made.tokens == {"blocked": core.answer([1, 2, 3], 10)}


def test_a_full_queue_raises_in_submit_or_ends_the_request() -> None:
    made = Client(max_num_seqs=2, max_num_queued_reqs=1, n_cells=64)
    made.block()
    made.client.submit(ask("a", prompt=[1] * 60, max_tokens=4))
    assert made.client.queue_full_error() is None
    made.client.submit(ask("b"))
    assert made.client.queue_full_error() is not None
    with pytest.raises(QueueFullError, match="2 requests may run and 1 may wait"):
        made.client.submit(ask("c"))
    made.gate.set()
    a, b = made.end_of("a", "b")  # `a` needs all cells, so it still waits
    assert isinstance(b.error, QueueFullError)
    assert a.finish_reason is FinishReason.LENGTH
    assert made.client.queue_full_error() is None
    # The queue has space, but a request waits for cells.
    made.client._receive_step([], EngineStats(num_queued=1, queue_s=6.5))
    full = made.client.queue_full_error()
    assert full is not None
    assert full.retry_after_s == 7
    made.client.close()
    assert made.client.queue_full_error() is None, (
        "a closed client reports no full queue: the server answers 503 itself"
    )


def test_a_cancel_applies_once_after_the_step_in_progress(made: Client) -> None:
    made.block()
    for _ in range(100):
        made.client.cancel("blocked")
        made.client.cancel("unknown")
    made.gate.set()
    assert made.end_of("blocked")[0].finish_reason is FinishReason.ABORT
    assert made.tokens["blocked"] == core.answer([1], 1)
    took = made.client.stats().seconds_of_cancels
    assert took.count == 1, "only cancels that ended a request count"
    assert took.sum > 0


def test_many_submits_and_cancels_stay_within_the_inbox_bound(made: Client) -> None:
    made.block()
    accepted = []
    for i in range(1000):
        with contextlib.suppress(QueueFullError):
            made.client.submit(ask(f"{i}"))
            accepted.append(f"{i}")
        made.client.cancel(f"{i}")
    assert len(accepted) == 11
    made.gate.set()
    made.end_of("blocked", *accepted)
    assert made.tokens["blocked"] == core.answer([1], 10)
    assert {made.ends[name].finish_reason for name in accepted} == {FinishReason.ABORT}


def test_the_inbox_accepts_all_messages_of_requests_with_most_choices() -> None:
    """Each of 32 requests sends a Submit, a Cancel for each of its 32 choices and one for all of them."""
    made = Client(max_num_seqs=32, max_num_queued_reqs=0, n_cells=64)
    made.block()
    names = [f"{i}" for i in range(31)]
    for name in names:
        made.client.submit(ask(name, n=32, temperature=1.0))
    for name in ["blocked", *names]:
        for index in [*range(32), None]:
            made.client.cancel(name, index)
    n_sent = 31 + 32 * 33
    assert made.client._loop._inbox.qsize() == n_sent
    assert made.client._inbox_max == 2 * (34 * 32 + CALLS_MAX)
    for _ in range(made.client._inbox_max - n_sent):
        made.client._loop.send(Cancel("unknown"))
    with pytest.raises(queue.Full):
        made.client._loop.send(Cancel("unknown"))
    made.gate.set()
    made.client.close()
    assert not made.client._open


def test_deadlines_use_the_clock_of_the_client(made: Client) -> None:
    made.block()
    made.now_s += 600.0
    made.gate.set()
    (end,) = made.end_of("blocked")
    assert end.finish_reason is FinishReason.TIMEOUT
    assert isinstance(end.error, RequestTimeoutError)


@pytest.mark.parametrize(
    ("token", "message"), [(core.DEADLY, "device is lost"), (core.PANICS, "index out of bounds")]
)
def test_a_dead_engine_ends_every_open_request_once_and_rejects_later_ones(token: int, message: str) -> None:
    made = Client(max_num_seqs=2)
    made.block()
    for name in "abc":
        made.client.submit(ask(name, prompt=[token]))
    made.gate.set()
    ends = made.end_of("blocked", *"abc")
    made.client.close()
    assert made.outputs.empty()
    assert all(isinstance(end.error, EngineDeadError) and message in str(end.error) for end in ends)
    assert len({id(end.error) for end in ends}) == 4, "each request has its own error object"
    with pytest.raises(EngineDeadError, match=message):
        made.client.submit(ask("late"))
    made.client.cancel("a")
    assert made.context is not None
    assert made.context.closed


@pytest.mark.parametrize(
    ("error", "count"), [(BrokenInvariant("7 cells are used, the requests own 3"), 1), (OSError("device"), 0)]
)
def test_invariant_violations_are_counted(made: Client, error: Exception, count: int) -> None:
    """They end the engine and are counted separately from other failures."""

    def check() -> None:
        raise error

    made.block()
    assert made.engine is not None
    made.engine.check = check  # type: ignore[method-assign]
    assert made.client.num_violations == 0
    made.gate.set()
    made.end_of("blocked")
    made.client.close()
    assert made.client.num_violations == count
    assert str(error) in str(made.client.error)


def test_close_ends_open_requests_and_is_idempotent(made: Client) -> None:
    made.block()
    made.client.submit(ask("waits", prompt=[1] * 40))
    thread = made.client._loop._thread
    join = thread.join

    def continue_step_then_join() -> None:
        made.gate.set()
        join()

    thread.join = continue_step_then_join  # type: ignore[method-assign,assignment]
    made.client.close()  # it joins the thread after sending Shutdown
    ends = made.end_of("blocked", "waits")
    assert all(isinstance(end.error, EngineDeadError) for end in ends)
    assert all("shutting down" in str(end.error) for end in ends)
    made.client.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        made.client.submit(ask("late"))


def test_an_engine_that_cannot_be_closed_has_ended_its_requests(
    made: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError("the device is lost")

    made.block()
    assert made.engine is not None
    made.engine.close = fails  # type: ignore[method-assign]
    made.gate.set()
    made.client.close()
    assert made.client.is_lost
    assert "closing the engine failed" in caplog.text
    made.end_of("blocked")
    assert made.outputs.empty()


def test_the_error_of_a_failed_load_is_raised() -> None:
    def build() -> LLMEngine:
        raise UnsupportedError("rope type 'odd' is not implemented")

    before = threading.active_count()
    with pytest.raises(UnsupportedError, match="odd"):
        InprocClient(build, limits(), lambda _: None)
    assert threading.active_count() == before


def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("NVIDIA H100", 90, 80 << 30)
    info = CudaInfo(None, "13.0", "13.0", (device,), ("/x",))
    monkeypatch.setattr(start, "cuda_info", lambda: info)


@pytest.mark.usefixtures("fake_core")
def test_device_auto_uses_a_gpu_which_reports_how_many_cells_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _gpus(monkeypatch)
    opened: list[core.Gpu | None] = []

    class Seen(core.Context):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            opened.append(settings["gpu"])
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(core, "Context", Seen)
    info = inspect_model(Path("fake"))
    config = Config(gpu_memory_utilization=0.5, cuda_sync=True, cuda_overlap=False)
    with caplog.at_level("INFO"):
        client = start_engine(config, info, lambda _: None)
    assert (client.limits.n_cells, client.limits.max_model_len) == (core.GPU_CELLS, core.GPU_CELLS)
    assert client.stats().kv_cells == core.GPU_CELLS
    assert "device auto: NVIDIA H100" in caplog.messages
    client.close()
    client = start_engine(Config(device="cuda", num_kv_cells=96), info, lambda _: None)
    assert client.limits.n_cells == 96
    client.close()
    start_engine(Config(device="cpu", num_kv_cells=96), info, lambda _: None).close()
    share = {"ordinal": 0, "memory_share": 0.5, "synchronous": True, "overlap": False}
    assert opened[0] is not None
    assert {name: opened[0].settings[name] for name in share} == share
    assert opened[1] is not None
    assert opened[2] is None


@pytest.mark.usefixtures("fake_core")
def test_device_auto_uses_the_cpu_if_the_gpu_does_not_support_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Narrow(core.Context):
        def __init__(self, *arguments: Any, gpu: core.Gpu | None, **settings: Any) -> None:
            if gpu is not None:
                raise UnsupportedError("the head width '16 on a GPU' is not supported")
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(core, "Context", Narrow)
    info = inspect_model(Path("fake"))
    with caplog.at_level("INFO"):
        start_engine(Config(num_kv_cells=96), info, lambda _: None).close()
        _gpus(monkeypatch)
        start_engine(Config(num_kv_cells=96), info, lambda _: None).close()
    why = [message for message in caplog.messages if "the CPU" in message]
    assert len(why) == 2
    assert "no NVIDIA driver" in why[0]
    assert "head width" in why[1]
    with pytest.raises(UnsupportedError, match="head width"):
        start_engine(Config(device="cuda", num_kv_cells=96), info, lambda _: None)


@pytest.mark.usefixtures("fake_core")
def test_start_sizes_the_kv_cache_and_loads_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        client = start_engine(Config(num_kv_cells=96), inspect_model(Path("fake")), lambda _: None)
    assert (client.limits.n_cells, client.limits.max_model_len) == (96, 96)
    lines = [record.message for record in caplog.records]
    assert any("KV cache: 96 cells" in line for line in lines)
    assert any("loaded fake" in line for line in lines)
    assert client.error is None
    client.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Settings of a disk tier with blocks of 8 tokens."""
    monkeypatch.setattr("llaisys.engine.disk_cache.block_index.BLOCK_TOKENS", 8)
    return {"prefix_cache_dir": tmp_path / "cache", "kv_cell_bytes": core.CELL_BYTES}


@pytest.mark.parametrize("dies", [False, True])
def test_only_a_healthy_engine_writes_its_prefixes_at_the_end(
    disk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool
) -> None:
    monkeypatch.setattr(DiskCache, "_can_write", lambda _: False)
    made = Client(**disk)
    made.client.submit(ask("a", prompt=[*range(1, 20)], max_tokens=2))
    made.end_of("a")
    if dies:
        made.client.submit(ask("b", prompt=[core.DEADLY]))
        made.end_of("b")
    made.client.close()
    assert len([*tmp_path.glob("cache/*/*.kv")]) == (0 if dies else 2)


def test_an_idle_engine_writes_and_loads_without_messages(disk: dict[str, Any], tmp_path: Path) -> None:
    prompt = [*range(1, 20)]
    for n_cached in (0, 16):
        made = Client(**disk)
        made.client.submit(ask("a", prompt=prompt, max_tokens=2))
        made.end_of("a")
        block_until(lambda: len([*tmp_path.glob("cache/*/*.kv")]) == 2)
        assert made.engine is not None
        assert made.engine.stats().external_hit_tokens == n_cached
        assert made.tokens["a"] == core.answer(prompt, 2)
        made.client.close()
