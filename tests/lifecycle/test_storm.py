"""An abort storm on the tiny golden model: 10,000 requests, of which 30 % are canceled at random moments.

Nothing leaks, and the other requests get the same outputs as alone.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections import Counter
from typing import Any

import psutil
import pytest

from children import engine_processes
from golden import FOLDER, load_golden
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.client import EngineClient
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.host import Cpus
from llaisys.engine.loop import build_engine
from llaisys.engine.memory import size_engine
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import inspect_model
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from waiting import until

SEED = 4
N_REQUESTS, N_AT_ONCE, ABORTED = 10_000, 64, 0.3
SETTINGS: dict[str, Any] = {
    "model": str(FOLDER),
    "dtype": "float32",
    "num_kv_cells": 1024,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 96,
}


class Watch:
    """Records an engine of this process: the last outputs of each request, and the number of steps until a
    canceled request has released its sequence."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine: LLMEngine | None = None
        self.ends: Counter[str] = Counter()
        self.lag_steps: Counter[int] = Counter()
        self.n_seq_free = 0
        self._requested_at: dict[str, int] = {}
        build, step, cancel = build_engine, LLMEngine.step, LLMEngine.cancel
        request_cancel = EngineClient.cancel

        def build_recorded(*arguments: Any) -> LLMEngine:
            self.engine = build(*arguments)
            return self.engine

        def request_recorded(client: EngineClient, request_id: str, index: int | None = None) -> None:
            request_cancel(client, request_id, index)
            if self.engine is not None:  # it is in the inbox, or already handled
                self._requested_at.setdefault(request_id, self.engine.stats_recorder.num_steps)

        def cancel_recorded(engine: LLMEngine, request_id: str, index: int | None = None) -> None:
            cancel(engine, request_id, index)
            assert all(each.request_id != request_id for each in engine.requests.running)
            assert engine.worker.n_seq_free == engine.limits.max_num_seqs - len(engine.requests.running)
            n_steps = engine.stats_recorder.num_steps
            self.lag_steps[n_steps - self._requested_at.get(request_id, n_steps)] += 1

        def step_recorded(engine: LLMEngine, now_s: float) -> list[EngineOutput]:
            outputs = step(engine, now_s)
            self.ends.update(output.request_id for output in outputs if output.last)
            self.n_seq_free = engine.worker.n_seq_free
            return outputs

        monkeypatch.setattr("llaisys.engine.start.build_engine", build_recorded)
        monkeypatch.setattr(LLMEngine, "step", step_recorded)
        monkeypatch.setattr(LLMEngine, "cancel", cancel_recorded)
        monkeypatch.setattr(EngineClient, "cancel", request_recorded)


def random_requests() -> list[tuple[list[int], SamplingParams]]:
    """Return 100 requests: prompts of 1 to 40 tokens, shared prefixes, greedy and sampled."""
    chance = random.Random(SEED)
    prompts = [list(prompt) for prompt in load_golden().prompts]
    made = []
    for i in range(100):
        prompt = (chance.choice(prompts) + chance.choice(prompts))[: chance.randint(1, 40)]
        params = SamplingParams(
            temperature=chance.choice([0.0, 1.0]),
            seed=i,
            max_tokens=chance.randint(1, 12),
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        made.append((prompt, params))
    return made


async def completion(service: AsyncLLM, prompt: list[int], params: SamplingParams, name: str) -> list[int]:
    return [i async for delta in service.generate(prompt, params, name) for i in delta.outputs[0].token_ids]


@pytest.mark.long
@pytest.mark.timeout(900)  # twenty seconds on two quiet cores
@pytest.mark.parametrize("form", ["thread", "process"])
async def test_an_abort_storm_leaks_nothing_and_changes_no_output(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    n_requests = N_REQUESTS if form == "thread" else N_REQUESTS // 10
    watch = Watch(monkeypatch)
    service = await AsyncLLM.start(Config(**SETTINGS, engine_process=form == "process"))
    requests, chance = random_requests(), random.Random(SEED)
    reference = [await completion(service, *request, f"alone-{i}") for i, request in enumerate(requests)]
    gc.collect()  # objects of earlier tests are closed now, not between the two counts
    before = asyncio.all_tasks(), threading.active_count(), psutil.Process().num_fds()
    outcomes: Counter[str] = Counter()
    names = iter(range(n_requests))
    canceled = set(chance.sample(range(n_requests), int(ABORTED * n_requests)))

    async def run_request(i: int) -> None:
        which = chance.randrange(len(requests))
        task = asyncio.create_task(completion(service, *requests[which], f"{i}"))
        if i in canceled:
            for _ in range(chance.randrange(60)):  # in the queue, in a prefill, in decoding
                await asyncio.sleep(0)
            if chance.random() < 0.2:
                service.abort(f"{i}")
            else:
                task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(result, (list, asyncio.CancelledError)), result
            if isinstance(result, list):
                assert result == reference[which][: len(result)], f"seed {SEED}, request {i}"
            outcomes["canceled"] += 1
        else:
            assert await task == reference[which], f"seed {SEED}, request {i}"
            outcomes["whole"] += 1

    async def client() -> None:
        for i in names:
            await run_request(i)

    await asyncio.gather(*(client() for _ in range(N_AT_ONCE)))
    assert outcomes == {"canceled": len(canceled), "whole": n_requests - len(canceled)}
    await completion(service, *requests[0], "last")  # every cancel is handled before it ends
    assert service._collectors == {}
    assert not service._processor._requests
    assert service._client is not None
    assert not service._client._open
    assert not service._client._cancelled
    stats = service._client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cells_used) == (0, 0, 0)
    assert stats.kv_cells_free + stats.kv_cells_retained == stats.kv_cells
    await until(lambda: (asyncio.all_tasks(), threading.active_count(), psutil.Process().num_fds()) == before)
    if watch.engine is not None:
        assert set(watch.ends.values()) == {1}
        assert not watch.engine.requests.by_ordinal
        assert not watch.engine.requests._choices
        assert watch.n_seq_free == SETTINGS["max_num_seqs"]
        assert max(watch.lag_steps) <= 1, watch.lag_steps
        assert watch.lag_steps.total() > n_requests // 10
    await service.close()
    assert engine_processes() == []


@pytest.mark.parametrize("n_steps", range(6), ids=lambda n: f"after {n} steps")
def test_the_cells_of_a_canceled_request_are_free_one_step_later(n_steps: int) -> None:
    """While another request runs: in the queue (0), during prefill (1 to 3), during decoding (from 4)."""
    settings = {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "speculative_config": None}
    config = Config(**{**SETTINGS, **settings})
    made = size_engine(config, inspect_model(FOLDER), 2**30, Cpus(1))
    engine = build_engine(made, 0)
    for name, n_prompt in (("stays", 2), ("goes", 40)):
        prompt = (load_golden().prompts[0] * 40)[:n_prompt]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.submit(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=(),
                arrival_s=0.0,
                deadline_s=600.0,
            )
        )
        if name == "stays":
            engine.step(0.0)
    for _ in range(n_steps):
        engine.step(0.0)
    before = engine.stats().kv_cells_used
    engine.cancel("goes")
    engine.step(0.0)
    assert engine.stats().kv_cells_used == 2 + n_steps + 1
    assert (before > 2 + n_steps) == (n_steps > 0)
    assert engine.stats().num_running == 1
    engine.check()
    engine.close()
