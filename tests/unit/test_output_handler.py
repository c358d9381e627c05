"""OutputHandler: outputs reach their readers in bounded chunks, with the time of their step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fakes import core
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.engine_output import EngineOutput
from llaisys.output_collector import COLLECTOR_BYTES_MAX
from llaisys.output_handler import (
    BYTES_PER_CHUNK,
    OUTPUTS_PER_CHUNK,
    READERS_PER_CHUNK,
    OutputHandler,
)
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import RequestOutputKind, SamplingParams


class Sink:
    """Collects processed outputs. `seen`: their number in each iteration of the event loop."""

    def __init__(self, n_bytes: int = 1) -> None:
        self.now_s = 0.0
        self.outputs: list[tuple[str, float]] = []
        self.seen: list[int] = []
        self.n_bytes = n_bytes
        self.then: Callable[[], None] = lambda: None
        self.handler = OutputHandler(asyncio.get_running_loop(), self.process, lambda: self.now_s)

    def process(self, output: EngineOutput, arrived_s: float) -> int:
        self.outputs.append((output.request_id, arrived_s))
        self.then()
        return self.n_bytes

    def step(self, *names: str) -> None:
        self.handler.deliver([EngineOutput(name, [1]) for name in names])

    async def all(self, n: int) -> list[int]:
        """Wait until `n` outputs are processed; return the number in each chunk."""
        while len(self.outputs) < n:
            await asyncio.sleep(0)
            self.seen.append(len(self.outputs))
        return [
            after - before
            for before, after in zip([0, *self.seen], self.seen, strict=False)
            if after > before
        ]


async def test_steps_of_one_chunk_wake_the_loop_once_and_keep_their_times() -> None:
    sink = Sink()
    for now_s, names in ((1.0, "ab"), (1.5, "a"), (4.0, "ba")):
        sink.now_s = now_s
        sink.step(*names)
    sink.now_s = 9.0
    assert await sink.all(5) == [5]
    assert sink.outputs == [("a", 1.0), ("a", 1.5), ("a", 4.0), ("b", 1.0), ("b", 4.0)]


@pytest.mark.parametrize(
    ("steps", "n_bytes", "chunk"),
    [
        ([1000], 1, READERS_PER_CHUNK),
        ([1] * 1000, 1, READERS_PER_CHUNK),
        ([READERS_PER_CHUNK] * 3, 1, READERS_PER_CHUNK),
        ([70] * 10, BYTES_PER_CHUNK // 8, 8),
        ([5], 100 * BYTES_PER_CHUNK, 1),
    ],
)
async def test_a_chunk_is_bounded_in_outputs_and_in_bytes(steps: list[int], n_bytes: int, chunk: int) -> None:
    sink = Sink(n_bytes)
    names = [[f"{i}-{j}" for j in range(n)] for i, n in enumerate(steps)]
    for each in names:
        sink.step(*each)
    n_all = sum(steps)
    chunks = await sink.all(n_all)
    assert chunks == [chunk] * (n_all // chunk) + [n_all % chunk] * (n_all % chunk > 0)
    assert [name for name, _ in sink.outputs] == [name for each in names for name in each]


async def test_a_chunk_has_the_outputs_of_some_requests_from_all_steps() -> None:
    sink = Sink()
    names = [f"{i}" for i in range(READERS_PER_CHUNK + 1)]
    for _ in range(3):
        sink.step(*names)
    assert await sink.all(3 * len(names)) == [3 * READERS_PER_CHUNK, 3]
    assert [name for name, _ in sink.outputs] == [name for name in names for _ in range(3)]


async def test_a_request_with_many_outputs_lets_the_others_take_their_turn() -> None:
    sink = Sink()
    for _ in range(3 * OUTPUTS_PER_CHUNK):
        sink.step("a")
    sink.step("b")
    await sink.all(3 * OUTPUTS_PER_CHUNK + 1)
    assert sink.outputs[OUTPUTS_PER_CHUNK][0] == "b"
    assert [name for name, _ in sink.outputs].count("a") == 3 * OUTPUTS_PER_CHUNK


async def test_readers_run_while_steps_arrive_faster_than_processing() -> None:
    """Each processed output produces two more steps, up to 5,000."""
    sink, n_steps = Sink(), 1

    def more() -> None:
        nonlocal n_steps
        for _ in range(2):
            if n_steps < 5000:
                n_steps += 1
                sink.step("a")

    sink.then = more
    sink.step("a")
    chunks = await sink.all(5000)
    assert sum(chunks) == 5000
    assert max(chunks) == OUTPUTS_PER_CHUNK
    sink.then = lambda: None
    sink.step("late")  # the loop is woken again
    assert len(await sink.all(5001)) > len(chunks)


async def test_an_error_in_processing_affects_that_output_alone() -> None:
    sink, errors = Sink(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fails() -> None:
        if len(sink.outputs) == 2:
            raise ValueError("on purpose")

    sink.then = fails
    sink.step("a", "b", "c")
    await sink.all(3)  # without a later step
    assert [name for name, _ in sink.outputs] == ["a", "b", "c"]
    assert [str(error) for error in errors] == ["on purpose"]


def test_outputs_for_a_closed_event_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    handler = OutputHandler(loop, lambda *_: 1)
    loop.close()
    handler.deliver([EngineOutput("a", [1])])
    assert not handler._steps


@asynccontextmanager
async def waiting_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[AsyncLLM, AsyncIterator[RequestOutput], asyncio.Future[RequestOutput]]]:
    """An AsyncLLM with a stream `a` that is read, and an engine without output."""
    inside, go, decode = threading.Event(), threading.Event(), core.Context.decode

    def wait_then_decode(context: core.Context, *arrays: Any) -> Any:
        inside.set()
        go.wait(30)
        return decode(context, *arrays)

    monkeypatch.setattr(core.Context, "decode", wait_then_decode)
    # Without speculation, whose start would wait in the decodes that it measures.
    service = await AsyncLLM.start(Config(num_kv_cells=512, speculative_config=None))
    stream = service.generate(
        [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=10, output_kind=RequestOutputKind.DELTA), "a"
    )
    first = asyncio.ensure_future(anext(stream))
    assert await asyncio.to_thread(inside.wait, 30)
    yield service, stream, first
    await stream.aclose()  # type: ignore[attr-defined]  # a generator
    go.set()
    await service.close()


@pytest.mark.usefixtures("fake_model")
async def test_latencies_use_step_times_not_loop_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten steps, a quarter of a second apart, are processed in one chunk."""
    async with waiting_stream(monkeypatch) as (service, _, first):
        begin_s = time.monotonic()
        now_s = begin_s
        service._output_handler._clock = lambda: now_s
        for step in range(10):
            now_s = begin_s + step / 4
            service._output_handler.deliver([EngineOutput("a", [step])])
        assert len((await first).outputs[0].token_ids) == 10
        stats = service.stats()
        assert stats.inter_token_latency_s.count == 9
        assert stats.inter_token_latency_s.sum == pytest.approx(9 / 4)
        state = service._request_stats._open["a"].state
        assert (state.first_token_ts, state.last_token_ts) == (begin_s, begin_s + 9 / 4)


@pytest.mark.usefixtures("fake_model")
async def test_a_healthy_reader_is_not_slow_for_any_number_of_pending_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More output than the limit of the collector arrives in one iteration of the loop."""
    async with waiting_stream(monkeypatch) as (service, stream, first):
        n_tokens = COLLECTOR_BYTES_MAX // 8
        for _ in range(n_tokens):
            service._output_handler.deliver([EngineOutput("a", [1])])
        deltas = [await first]
        while sum(len(delta.outputs[0].token_ids) for delta in deltas) < n_tokens:
            deltas.append(await anext(stream))
        assert len(deltas) <= -(-n_tokens // OUTPUTS_PER_CHUNK), "several steps share a delta"
