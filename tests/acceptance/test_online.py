"""The asynchronous API: streams, cancels, limits, deadlines; each request ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from golden import FOLDER, Golden
from llaisys import AsyncLLM, RequestOutputKind, SamplingParams
from llaisys.config import Config
from llaisys.errors import ContextLengthError, EngineDeadError, QueueFullError, RequestTimeoutError
from serving import long_model

pytestmark = pytest.mark.stage2
# It does not end before a test has acted.
LONG = SamplingParams(temperature=0, max_tokens=60_000, ignore_eos=True)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of an engine with capacity for LONG."""
    model = str(long_model(tmp_path_factory.mktemp("online")))
    return {"model": model, "dtype": "float32", "num_kv_cells": 65536}


@pytest.fixture
async def service() -> AsyncIterator[AsyncLLM]:
    started = await AsyncLLM.start(Config(model=str(FOLDER), dtype="float32", max_num_seqs=8))
    yield started
    await started.close()


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def collect(
    service: AsyncLLM, prompt: list[int], params: SamplingParams, name: str
) -> tuple[list[int], str]:
    """Return the ids of a request and its finish reason; only the last delta may be the end."""
    ids: list[int] = []
    ends = []
    async for delta in service.generate(prompt, params, name):
        assert not ends, "a delta after the end"
        ids += delta.outputs[0].token_ids
        if delta.finished:
            ends.append(delta.outputs[0].finish_reason)
    assert len(ends) == 1
    return ids, str(ends[0])


async def test_concurrent_streams_give_the_reference(service: AsyncLLM, golden: Golden) -> None:
    answers = await asyncio.gather(
        *(collect(service, golden.prompts[i % 3], greedy(24), f"r{i}") for i in range(30))
    )
    assert answers == [(golden.greedy[i % 3], "length") for i in range(30)]
    stats = service.stats().engine
    assert (stats.num_running, stats.num_waiting, stats.kv_cells_used) == (0, 0, 0)


async def test_a_closed_stream_is_canceled_and_the_others_continue(
    long: dict[str, Any], golden: Golden
) -> None:
    service = await AsyncLLM.start(Config(**long))
    stream = service.generate(golden.prompts[1], LONG, "left")
    await anext(stream)
    other = asyncio.ensure_future(collect(service, golden.prompts[1], greedy(24), "stays"))
    await stream.aclose()  # type: ignore[attr-defined]
    assert await other == (golden.greedy[1], "length")
    # The first token of the next request comes a step after the cancel, when the cells are free.
    await collect(service, [1], greedy(1), "after")
    assert service.stats().engine.kv_cells_used == 0
    await service.close()


async def test_abort_by_id_ends_the_stream(long: dict[str, Any], golden: Golden) -> None:
    service = await AsyncLLM.start(Config(**long))
    reasons = []
    async for delta in service.generate(golden.prompts[1], LONG, "named"):
        service.abort("named")
        reasons.append(delta.outputs[0].finish_reason)
    assert reasons[-1] == "abort"
    service.abort("named")
    service.abort("never existed")
    await service.close()


async def test_the_queue_is_bounded_and_refuses_at_once(long: dict[str, Any], golden: Golden) -> None:
    config = Config(**long, max_num_seqs=1, max_num_queued_reqs=2)
    service = await AsyncLLM.start(config)
    streams = [service.generate(golden.prompts[1], LONG, f"r{i}") for i in range(3)]
    first = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await first[0]
    refused = service.generate(golden.prompts[1], LONG, "r3")
    with pytest.raises(QueueFullError, match="2"):
        await anext(refused)
    await streams[0].aclose()  # type: ignore[attr-defined]
    await first[1]
    await service.close()


async def test_a_request_beyond_the_context_is_refused_with_both_numbers(service: AsyncLLM) -> None:
    with pytest.raises(ContextLengthError, match=r"(?s)500.*512|512.*500"):
        await anext(service.generate([1] * 500, greedy(13), "big"))


async def test_a_request_past_its_deadline_ends(long: dict[str, Any], golden: Golden) -> None:
    """One runs and one waits; both are past the deadline at the first step after it."""
    config = Config(**long, max_num_seqs=1, request_timeout_s=1e-6)
    service = await AsyncLLM.start(config)
    results = await asyncio.gather(
        *(collect(service, golden.prompts[1], LONG, f"r{i}") for i in range(2)), return_exceptions=True
    )
    assert [type(r) for r in results] == [RequestTimeoutError] * 2
    assert service.stats().engine.kv_cells_used == 0
    await service.close()


async def test_close_ends_open_streams_once_and_refuses_new_ones(
    long: dict[str, Any], golden: Golden
) -> None:
    service = await AsyncLLM.start(Config(**long))
    stream = service.generate(golden.prompts[1], LONG, "open")
    await anext(stream)
    await service.close()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await anext(service.generate(golden.prompts[1], LONG, "late"))
    assert not service.is_ready()
    await service.close()
