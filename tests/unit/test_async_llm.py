"""AsyncLLM on the fake core: streams, cancellation, slow readers, engine failures, draining and stats."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from fakes import core, text
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RejectedError,
    RequestFailedError,
    RequestTimeoutError,
    UnsupportedError,
)
from llaisys.model_assets import ModelAssets
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from waiting import until

PROMPT = [1, 2, 3]
DELTA = RequestOutputKind.DELTA


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 10, "output_kind": DELTA, **changes})


class Gate:
    """Block the engine before each decode while closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.stepping = threading.Event()
        self.n_left = 0  # if above 0, the gate closes after this many decodes
        decode = core.Context.decode

        def wait_then_decode(context: core.Context, *arrays: Any) -> Any:
            self.stepping.set()
            self.opened.wait(30)
            self.n_left -= 1
            if self.n_left == 0:
                self.opened.clear()
            return decode(context, *arrays)

        monkeypatch.setattr(core.Context, "decode", wait_then_decode)

    async def reached(self) -> None:
        """Wait until the engine is inside a step."""
        assert await asyncio.to_thread(self.stepping.wait, 30)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, fake_core: None) -> Gate:  # noqa: ARG001 -- used for its effect
    return Gate(monkeypatch)


@contextlib.asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[AsyncLLM]:
    # Without speculation: its start decodes, which the gate would take for a step.
    service = await AsyncLLM.start(Config(**{"num_kv_cells": 512, "speculative_config": None, **settings}))
    try:
        yield service
    finally:
        await service.close()
        assert not service.is_alive()


async def collect(service: AsyncLLM, request_id: str, prompt: Any = None, **params: Any) -> RequestOutput:
    """Return the merged deltas, after checking that only the last one is finished."""
    deltas = [d async for d in service.generate(prompt or PROMPT, greedy(**params), request_id)]
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    whole = deltas[-1]
    whole.outputs[0].text = "".join(d.outputs[0].text for d in deltas)
    whole.outputs[0].token_ids = [i for d in deltas for i in d.outputs[0].token_ids]
    return whole


pytestmark = pytest.mark.usefixtures("fake_model")


async def test_a_stream_is_the_completion_in_pieces() -> None:
    async with started() as service:
        output = await collect(service, "a")
    assert output.outputs[0].token_ids == core.answer(PROMPT, 10)
    assert output.outputs[0].text == text.tokenizer().decode(core.answer(PROMPT, 10), True)
    assert (output.outputs[0].finish_reason, output.prompt_token_ids) == ("length", PROMPT)


async def test_concurrent_streams_keep_their_tokens() -> None:
    async with started(max_num_seqs=5) as service:
        prompts = [[i, i + 1, i + 2] for i in range(40)]
        outputs = await asyncio.gather(*(collect(service, f"{p}", p) for p in prompts))
    assert [o.outputs[0].token_ids for o in outputs] == [core.answer(p, 10) for p in prompts]


async def test_the_choices_of_a_stream() -> None:
    async with started(max_num_seqs=5) as service:
        params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=8, output_kind=DELTA)
        pieces: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends: dict[int, str | None] = {}
        finished = []
        async for delta in service.generate(PROMPT, params, "a"):
            finished.append(delta.finished)
            for answer in delta.outputs:
                assert answer.index not in ends, "a delta after the end of its choice"
                pieces[answer.index] += answer.token_ids
                if answer.finish_reason is not None:
                    ends[answer.index] = answer.finish_reason
        assert finished == [False] * (len(finished) - 1) + [True]
        assert ends == dict.fromkeys(range(3), "length")
        specs = [core.SamplerSpec(temperature=1.0, seed=4, choice=i) for i in range(3)]
        assert [*pieces.values()] == [core.answer(PROMPT, 8, spec) for spec in specs]
        await collect(service, "b")
        assert service.stats().finished == {"length": 2}
        with pytest.raises(RequestFailedError):
            async for _ in service.generate([1, core.NON_FINITE], params, "c"):
                pass
        await collect(service, "d")
        assert service.stats().engine.num_running == 0


async def test_model_info_for_a_server(fake_model: ModelAssets) -> None:
    async with started(served_model_name=("x", "y"), max_model_len=100) as service:
        assert service.model_names == ("x", "y")
        assert service.max_model_len == 100
        assert service.default_sampling_params == {"temperature": 0.0}
        assert service.model_info is fake_model.info
        assert service.config.max_model_len == 100
        assert service.is_ready()
        assert service.is_alive()
    async with started() as service:
        assert service.model_names == ("fake",)


async def test_text_is_tokenized_and_chats_are_rendered() -> None:
    async with started() as service:
        output = await collect(service, "a", "hi")
        assert output.prompt == "hi"
        assert output.prompt_token_ids == await service.encode("hi")
        ids = await service.chat_prompt([{"role": "user", "content": "hi"}])
        assert await service.decode(ids) == "user:hi;>"
        ids = await service.chat_prompt([{"role": "user", "content": "hi"}], add_generation_prompt=False)
        assert await service.decode(ids) == "user:hi;"
        with pytest.raises(RejectedError):
            await service.chat_prompt([{"role": "user"}])


async def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    async with started(max_input_tokens=5) as service:
        with pytest.raises(ContextLengthError, match="100000 bytes"):
            await collect(service, "a", "a" * 100_000)
        cut = await collect(service, "b", "a" * 100_000, truncate_prompt_tokens=3)
        assert len(cut.prompt_token_ids) == 3


async def test_a_missing_template_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llaisys.async_llm.load_model_assets", lambda _: text.model(template=None))
    async with started() as service:
        with pytest.raises(UnsupportedError, match="no chat template"):
            await service.chat_prompt([{"role": "user", "content": "hi"}])


async def test_a_stop_string_ends_the_stream_and_the_request() -> None:
    shown = text.tokenizer().decode(core.answer(PROMPT, 10), True)
    async with started() as service:
        output = await collect(service, "a", stop=[shown[3]], max_tokens=100)
        assert output.outputs[0].text == shown[: shown.index(shown[3])]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", shown[3])
        await collect(service, "b")  # the engine processed the cancel before this request ended
        assert service.stats().engine.num_running == 0
        assert service.stats().finished == {"stop": 1, "length": 1}


@pytest.mark.parametrize(
    ("prompt", "error"), [([1] * 200, ContextLengthError), ([], RejectedError), ([300], RejectedError)]
)
async def test_a_rejection_is_raised_by_the_first_anext(prompt: list[int], error: type[Exception]) -> None:
    async with started() as service:
        stream = service.generate(prompt, greedy(), "a")
        with pytest.raises(error):
            await anext(stream)
        assert service.stats().finished == {}
        await collect(service, "a")


async def test_a_request_for_a_full_queue_is_rejected(gate: Gate) -> None:
    async with started(max_num_seqs=1, max_num_queued_reqs=1) as service:
        gate.opened.clear()
        first = asyncio.create_task(collect(service, "a"))
        await gate.reached()
        second = asyncio.create_task(collect(service, "b"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError) as caught:
            await collect(service, "c")
        assert caught.value.retry_after_s >= 1
        gate.opened.set()
        outputs = await asyncio.gather(first, second)
        assert all(o.outputs[0].token_ids == core.answer(PROMPT, 10) for o in outputs)


async def test_a_request_id_in_use_is_rejected(gate: Gate) -> None:
    async with started() as service:
        gate.opened.clear()
        first = asyncio.create_task(collect(service, "a"))
        await gate.reached()
        with pytest.raises(RejectedError, match="in use"):
            await collect(service, "a")
        gate.opened.set()
        assert (await first).finished


@pytest.mark.parametrize("how", ["aclose", "task"])
async def test_closing_a_stream_cancels_within_a_step(gate: Gate, how: str) -> None:
    async with started() as service:
        if how == "aclose":
            gate.n_left = 1
            stream = service.generate(PROMPT, greedy(max_tokens=100), "a")
            await anext(stream)
            await stream.aclose()
        else:
            gate.opened.clear()
            task = asyncio.create_task(collect(service, "a", max_tokens=100))
            await gate.reached()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.opened.set()
        await collect(service, "b", max_tokens=2)
        stats = service.stats()
        assert (stats.engine.num_running, stats.engine.kv_cells_used) == (0, 0)
        assert stats.finished == {"abort": 1, "length": 1}


async def test_a_stream_that_was_never_read_submits_nothing() -> None:
    async with started() as service:
        stream = service.generate(PROMPT, greedy(), "a")
        await stream.aclose()
        assert service.stats().finished == {}


async def test_abort_ends_the_stream_with_its_reason(gate: Gate) -> None:
    async with started() as service:
        gate.opened.clear()
        task = asyncio.create_task(collect(service, "a", max_tokens=100))
        await gate.reached()
        service.abort("a")
        service.abort("unknown")
        gate.opened.set()
        output = await task
        assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
        assert service.stats().finished == {"abort": 1}


async def test_a_late_reader_gets_several_steps_at_once() -> None:
    async with started() as service:
        stream = service.generate(PROMPT, greedy(max_tokens=50), "a")
        deltas = [await anext(stream)]
        for i in range(50):  # each one takes its own step, which also decodes one token of `a`
            await collect(service, f"{i}", max_tokens=1)
        deltas += [delta async for delta in stream]
        assert [i for d in deltas for i in d.outputs[0].token_ids] == core.answer(PROMPT, 50)
        assert len(deltas) <= 2
        assert deltas[-1].finished


async def test_a_reader_that_never_reads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llaisys.output_collector.COLLECTOR_BYTES_MAX", 100)
    async with started() as service:
        stream = service.generate(PROMPT, greedy(max_tokens=100), "a")
        await anext(stream)
        for i in range(100):  # each one takes its own step, which also decodes one token of `a`
            await collect(service, f"{i}", max_tokens=1)
        with pytest.raises(RequestFailedError, match="behind"):
            async for _ in stream:
                pass
        assert service.stats().finished == {"length": 100, "error": 1}


async def test_a_faulty_row_and_a_timeout_end_only_their_stream() -> None:
    async with started() as service:
        good = asyncio.create_task(collect(service, "good"))
        with pytest.raises(RequestFailedError, match="not finite"):
            await collect(service, "bad", [core.NON_FINITE])
        assert (await good).finished
    async with started(request_timeout_s=1e-9) as service:
        with pytest.raises(RequestTimeoutError):
            await collect(service, "late")
        assert service.stats().finished == {"timeout": 1}


async def test_a_stuck_engine_is_not_alive_even_before_its_streams_end() -> None:
    """A server that polls in between would exit with 0 if the engine seemed alive."""
    async with started() as service:
        assert service._client is not None
        watch = service._client._watchdog
        assert watch is not None
        watch.is_stuck = True
        assert (service.is_stuck(), service.is_alive(), service.is_ready()) == (True, False, False)
        watch.is_stuck = False  # so that close() waits for its thread


@pytest.mark.parametrize("trouble", [core.DEADLY, core.PANICS])
async def test_an_engine_failure_ends_every_stream_and_readiness(gate: Gate, trouble: int) -> None:
    async with started() as service:
        gate.opened.clear()
        calls = (collect(service, f"{p}", p, max_tokens=100) for p in ([1], [2], [3], [trouble]))
        streams = [asyncio.create_task(call) for call in calls]
        await gate.reached()
        await until(lambda: not service._unsubmitted)
        gate.opened.set()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 4
        assert not service.is_alive()
        assert not service.is_ready()
        with pytest.raises(EngineDeadError):
            await collect(service, "late")


async def test_drain_waits_for_open_streams(gate: Gate) -> None:
    async with started() as service:
        gate.opened.clear()
        task = asyncio.create_task(collect(service, "a"))
        await gate.reached()
        closing = asyncio.create_task(service.close(drain_s=30))
        await asyncio.sleep(0)
        assert not service.is_ready()
        assert service.is_alive()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(service, "b")
        gate.opened.set()
        assert (await task).outputs[0].finish_reason == "length"
        await closing


async def test_close_without_drain_ends_open_streams(
    monkeypatch: pytest.MonkeyPatch, fake_model: ModelAssets
) -> None:
    """The completion would be 20,000 tokens, so it does not end before the engine stops."""
    endless = replace(fake_model.info, max_position_embeddings=20_000)
    monkeypatch.setattr("llaisys.async_llm.load_model_assets", lambda _: text.model(info=endless))
    async with started(num_kv_cells=20_000) as service:
        stream = service.generate(PROMPT, greedy(max_tokens=None), "a")
        await anext(stream)
        closing = asyncio.create_task(service.close())
        with pytest.raises(EngineDeadError, match="shutting down"):
            async for _ in stream:
                pass
        await closing
        await service.close()


async def test_stats_count_tokens_and_latencies() -> None:
    async with started() as service:
        await collect(service, "a")
        await collect(service, "b", max_tokens=1)
        stats = service.stats()
        assert (stats.prompt_tokens, stats.generation_tokens) == (6, 11)
        assert stats.finished == {"length": 2}
        assert stats.time_to_first_token_s.count == 2
        assert stats.e2e_request_latency_s.count == 2
        assert 1 <= stats.inter_token_latency_s.count <= 9
        assert stats.engine.kv_cells == 512
        assert stats.engine.tokens_of_steps.sum == 6 + 9 - stats.engine.prefix_hit_tokens
        queue, prefill, first = stats.queue_time_s, stats.prefill_time_s, stats.time_to_first_token_s
        assert queue.count == prefill.count == 2
        assert queue.sum + prefill.sum == pytest.approx(first.sum)


async def test_a_failed_start_reports_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="cuda"):
        await AsyncLLM.start(Config(device="cuda"))
    with pytest.raises(RejectedError, match="max_model_len"):
        await AsyncLLM.start(Config(max_model_len=4096))

    def broken(*_: Any, **__: Any) -> None:
        raise UnsupportedError("rope type 'odd'")

    monkeypatch.setattr(core.Context, "__init__", broken)
    with pytest.raises(UnsupportedError, match="odd"):
        await AsyncLLM.start(Config())


async def test_a_lazy_model_is_loaded_once_for_all_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    init = core.Context.__init__

    def counted(self: core.Context, path: str, **settings: Any) -> None:
        made.append(path)
        init(self, path, **settings)

    monkeypatch.setattr(core.Context, "__init__", counted)
    async with started(preload=False) as service:
        assert (service.is_loaded(), service.is_ready(), made) == (False, True, [])
        assert service.max_model_len == 128
        assert service.stats().engine.kv_cells == 0
        outputs = await asyncio.gather(*(collect(service, f"{i}") for i in range(8)))
        assert [o.outputs[0].token_ids for o in outputs] == [core.answer(PROMPT, 10)] * 8
        assert (service.is_loaded(), made) == (True, ["fake"])


async def test_an_idle_model_is_unloaded_and_loaded_again(gate: Gate) -> None:
    async with started(idle_unload_s=0.05) as service:
        gate.opened.clear()
        task = asyncio.create_task(collect(service, "a", max_tokens=3))
        await gate.reached()
        await asyncio.sleep(0.1)  # twice the idle time, with an open request
        assert service.is_loaded()
        gate.opened.set()
        await task
        for turn in range(3):
            await until(lambda: not service.is_loaded())
            assert service.is_ready()
            output = await collect(service, f"{turn}")
            assert output.outputs[0].token_ids == core.answer(PROMPT, 10)
        assert service.stats().finished == {"length": 4}


@pytest.mark.timeout(30)
async def test_a_request_during_an_unload() -> None:
    """Submit in each iteration of the loop during an unload.

    One request then arrives between the end of the unload and its callback.
    """
    async with started(idle_unload_s=0.01) as service:
        while service.is_loaded():  # noqa: ASYNC110 -- a pause would miss the start of the unload
            await asyncio.sleep(0)
        loads = []
        while not service.is_loaded():
            loads.append(asyncio.create_task(service.load()))
            await asyncio.sleep(0)
        await asyncio.gather(*loads)


async def test_a_dead_engine_is_not_unloaded() -> None:
    async with started(idle_unload_s=0.01) as service:
        with pytest.raises(EngineDeadError):
            await collect(service, "bad", [core.DEADLY])
        await asyncio.sleep(0.05)
        assert service.is_loaded()
        assert not service.is_alive()


async def test_a_failed_load_of_a_lazy_model_fails_the_request_and_is_retried_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = core.Context.__init__

    def broken(*_: Any, **__: Any) -> None:
        raise UnsupportedError("rope type 'odd'")

    async with started(preload=False) as service:
        monkeypatch.setattr(core.Context, "__init__", broken)
        results = await asyncio.gather(*(collect(service, f"{i}") for i in range(3)), return_exceptions=True)
        assert all(isinstance(r, EngineDeadError) and "odd" in str(r) for r in results)
        assert service._collectors == {}
        monkeypatch.setattr(core.Context, "__init__", init)
        assert (await collect(service, "a")).finished


async def test_close_during_a_load_ends_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    init = core.Context.__init__
    loading, go = threading.Event(), threading.Event()

    def slow(self: core.Context, path: str, **settings: Any) -> None:
        loading.set()
        go.wait(30)
        init(self, path, **settings)

    monkeypatch.setattr(core.Context, "__init__", slow)
    async with started(preload=False) as service:
        task = asyncio.create_task(collect(service, "a", max_tokens=100))
        assert await asyncio.to_thread(loading.wait, 30)
        closing = asyncio.create_task(service.close())
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await task
        await closing


async def test_no_state_is_left_behind() -> None:
    before = set(threading.enumerate())
    async with started() as service:
        for i in range(20):
            await collect(service, f"{i}")
        assert not service._collectors
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "llaisys-engine"]
