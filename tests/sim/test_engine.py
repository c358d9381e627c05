"""Whole-engine runs on the fake core from one seed: arrivals, cancels, bad rows, time-outs, small caches.

After every step the books balance; at the end every request has had exactly one end, nothing is held, and
each answer is the one that the request gets alone. A failing seed is in the test's name, and replays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from fakes import core
from fakes.asks import ask, limits
from fakes.clock import FakeClock
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.request import EngineRequest, derive_seed
from llaisys.engine.worker import Worker
from llaisys.errors import ContextLengthError, LlaisysError, QueueFullError
from llaisys.types import FinishReason

N_STEPS = 400
STEP_S = 0.05
# A request that is never cancelled and whose deadline is far ends within so many steps: nobody starves.
STEPS_TO_END_MAX = 4000


@dataclass
class Fate:
    """What was submitted, and what is expected of it."""

    request: EngineRequest
    seed: int
    cancelled: bool = False
    n_ends: int = 0
    reason: FinishReason | None = None
    stop_reason: int | None = None
    tokens: list[int] | None = None


class World:
    """An engine, its fake core, and clients that do as the seed says."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.clock = FakeClock()
        self.limits = limits(
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=rng.choice([1, 4, 16, 64]),
            max_num_queued_reqs=rng.choice([0, 2, 20]),
            n_cells=rng.choice([64, 100, 400]),
        )
        self.context = core.Context(
            "fake",
            n_cells=self.limits.n_cells,
            n_seq_max=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
        )
        worker = Worker(self.context, core.SamplerSpec)  # type: ignore[arg-type]
        self.engine = LLMEngine(Executor(worker), self.limits, seed)
        self.fates: dict[str, Fate] = {}
        self.n_submitted = 0
        self.n_refused = 0

    def arrive(self) -> None:
        """One random request; refusals leave nothing behind."""
        rng = self.rng
        prompt = [rng.randrange(core.N_PLAIN) for _ in range(rng.choice([1, 2, 10, 50]))]
        if rng.random() < 0.03:
            prompt[rng.randrange(len(prompt))] = rng.choice([core.NON_FINITE, core.REFUSED])
        params: dict[str, Any] = {"max_tokens": rng.choice([None, 1, 5, 30])}
        params["priority"] = rng.choice([0, 0, 0, -1])
        if rng.random() < 0.5:
            params["temperature"] = 1.0
        if rng.random() < 0.3:
            params["stop_token_ids"] = [rng.randrange(core.N_PLAIN) for _ in range(40)]
        if rng.random() < 0.1:
            params["deadline_s"] = self.clock.now_s + rng.random() * 3
        else:
            params["deadline_s"] = self.clock.now_s + STEPS_TO_END_MAX * STEP_S
        request = ask(f"{len(self.fates)}", prompt, arrival_s=self.clock.now_s, **params)
        seed = derive_seed(self.seed, self.n_submitted)
        try:
            self.engine.submit(request)
        except (QueueFullError, ContextLengthError):
            self.n_refused += 1
            return
        self.n_submitted += 1
        self.fates[request.request_id] = Fate(request, seed, tokens=[])

    def cancel(self) -> None:
        """Somebody hangs up; perhaps after the end, perhaps twice."""
        if self.fates:
            name = self.rng.choice([*self.fates])
            fate = self.fates[name]
            fate.cancelled |= fate.n_ends == 0
            self.engine.cancel(name)

    def step(self) -> None:
        """One engine step, and the books after it."""
        self.clock.advance(STEP_S)
        if not self.engine.has_work():
            return
        for output in self.engine.step(self.clock()):
            fate = self.fates[output.request_id]
            assert fate.n_ends == 0, "an output after the end"
            assert fate.tokens is not None
            fate.tokens += output.new_token_ids
            fate.n_ends += output.finish_reason is not None
            fate.reason, fate.stop_reason = output.finish_reason, output.stop_reason
            assert (output.error is not None) == (fate.reason in (FinishReason.TIMEOUT, FinishReason.ERROR))
        self.engine.check()


def expected(world: World, fate: Fate) -> list[int]:
    """The answer of the request alone, up to what ends it."""
    request, params = fate.request, fate.request.params
    n_most = params.max_tokens or world.limits.max_model_len - len(request.prompt_token_ids)
    spec = core.SamplerSpec(temperature=params.temperature, seed=fate.seed)
    tokens = core.answer(request.prompt_token_ids, n_most, spec)
    for i, token in enumerate(tokens):
        if token in params.stop_token_ids:
            return tokens[: i + 1]
    return tokens


def judge(world: World, fate: Fate) -> None:
    """One end, of the right kind, with the right tokens."""
    assert fate.n_ends == 1
    assert fate.tokens is not None
    want = expected(world, fate)
    trouble = {core.NON_FINITE, core.REFUSED} & set(fate.request.prompt_token_ids)
    match fate.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            assert not trouble
            assert fate.tokens == want
            assert (fate.reason is FinishReason.STOP) == (want[-1] in fate.request.params.stop_token_ids)
            assert fate.stop_reason == (want[-1] if fate.reason is FinishReason.STOP else None)
        case FinishReason.ERROR:
            assert trouble
            assert fate.tokens == []
        case FinishReason.ABORT:
            assert fate.cancelled
            assert fate.tokens == want[: len(fate.tokens)]
        case FinishReason.TIMEOUT:
            assert fate.request.deadline_s - fate.request.arrival_s < 3, "starved"
            assert fate.tokens == want[: len(fate.tokens)]
        case None:
            pytest.fail("no end")


@pytest.mark.parametrize("seed", range(40))
def test_a_run_from_a_seed(seed: int) -> None:
    world = World(seed)
    for _ in range(N_STEPS):
        while world.rng.random() < 0.3:
            world.arrive()
        if world.rng.random() < 0.05:
            world.cancel()
        world.step()
    while world.engine.has_work():
        world.step()
    for fate in world.fates.values():
        judge(world, fate)
    assert world.context.n_cells_free + world.engine.stats().kv_cells_retained == world.limits.n_cells
    assert world.context.n_seq_free == world.limits.max_num_seqs
    assert world.context.n_rows_max <= world.limits.max_num_batched_tokens
    assert len(world.fates) > 10


def test_the_canary_dies() -> None:
    """A world in which cells leak is noticed: the harness is alive."""
    world = World(0)
    world.context.seq_release = lambda _: None  # type: ignore[method-assign]

    def run() -> None:
        for _ in range(N_STEPS):
            world.arrive()
            world.step()

    with pytest.raises((AssertionError, LlaisysError)):
        run()
