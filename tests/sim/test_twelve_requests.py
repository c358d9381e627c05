"""Twelve requests on eight sequence ids, with every way to end. A leaked id stops the engine early.

Ids and cells are those of the real core. The id or cell that was freed last is acquired next, so that a stale
use is detected at once. Each negative test breaks one thing, and verifies that its check detects it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from fakes.asks import ask, limits
from fakes.core import NON_FINITE, SamplerSpec
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.request import BrokenInvariant, EngineRequest
from llaisys.engine.worker import Worker
from llaisys.errors import EngineDeadError
from llaisys.outputs import FinishReason
from sim.context import SimContext, answer

N_IDS, N_PROMPT, N_OUTPUT = 8, 12, 6
N_CELLS = N_IDS * (N_PROMPT + N_OUTPUT)
STEP_S = 0.01
# With twelve short requests on eight ids, no request is open for this many steps.
STEPS_MAX = 200
ENDS = ("eos", "length", "queue", "prefill", "decode", "timeout", "fault")


class Eight:
    """The engine under test, with eight sequence ids."""

    def __init__(self) -> None:
        self.context = SimContext(n_cells=N_CELLS, n_seq_max=N_IDS, lifo=True)
        bounds = limits(
            max_num_seqs=N_IDS,
            max_num_batched_tokens=16,
            max_num_queued_reqs=16,
            max_model_len=N_PROMPT + N_OUTPUT,
            n_cells=N_CELLS,
            timeout_scan_s=0.0,
        )
        worker = Worker(self.context, SamplerSpec)  # type: ignore[arg-type]
        self.engine = LLMEngine(Executor(worker), bounds, 0)
        self.now_s = 1000.0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.born: dict[str, int] = {}
        self.n_steps = 0

    def submit(self, request: EngineRequest) -> None:
        self.engine.submit(request)
        self.tokens[request.request_id] = []
        self.born[request.request_id] = self.n_steps

    def step(self) -> list[EngineOutput]:
        """Run one step and all checks: every request ends, and no id is free while a request waits."""
        free_before = self.context.n_seq_free
        waited = self.engine.stats().num_waiting
        outputs = self.engine.step(self.now_s)
        self.now_s += STEP_S
        self.n_steps += 1
        for output in outputs:
            name = output.request_id
            assert name not in self.ends
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[name] = output.finish_reason
                assert self.n_steps - self.born.pop(name) <= STEPS_MAX
        self.engine.check()
        if free_before and waited:  # the budget of 16 tokens leaves at least one for eight ids
            n_ended = sum(output.finish_reason is not None for output in outputs)
            stats = self.engine.stats()
            assert stats.num_waiting < waited or n_ended, "an id was free, and no waiting request acquired it"
        return outputs

    def run(self) -> None:
        while self.engine.has_work():
            self.step()


def prompt_of(i: int) -> list[int]:
    """Return one of four prompts; requests 4, 8 and 12 have the same."""
    rng = random.Random(i % 4)
    return [rng.randrange(200) for _ in range(N_PROMPT)]


def request_of(i: int, way: str, now_s: float) -> EngineRequest:
    prompt = prompt_of(i)
    facts: dict[str, Any] = {"max_tokens": N_OUTPUT, "arrival_s": now_s, "deadline_s": now_s + 600}
    if way == "eos":
        facts["eos_token_ids"] = (alone(i)[2],)
    if way == "timeout":
        facts["deadline_s"] = now_s + 2 * STEP_S
    if way == "fault":
        prompt[N_PROMPT // 2] = NON_FINITE
    return ask(f"{i}", prompt, **facts)


def alone(i: int) -> list[int]:
    """Return the output of the request alone."""
    return [*islice(answer(prompt_of(i), SamplerSpec(temperature=0.0)), N_OUTPUT)]


def cancel_at_stage(world: Eight, i: int, way: str) -> None:
    """Cancel request `i` when it has reached the stage of its way to end."""
    stages: dict[str, Callable[[], bool]] = {
        "queue": lambda: True,
        "prefill": lambda: world.n_steps > world.born[f"{i}"],
        "decode": lambda: bool(world.tokens[f"{i}"]),
    }
    if way in stages and f"{i}" not in world.ends and stages[way]():
        world.engine.cancel(f"{i}")


def check_end(world: Eight, i: int, way: str) -> None:
    tokens, end = world.tokens[f"{i}"], world.ends[f"{i}"]
    assert tokens == alone(i)[: len(tokens)]
    match way:
        case "length":
            assert (end, len(tokens)) == (FinishReason.LENGTH, N_OUTPUT)
        case "eos":
            assert (end, tokens) == (FinishReason.STOP, alone(i)[: alone(i).index(alone(i)[2]) + 1])
        case "timeout":
            assert end in (FinishReason.TIMEOUT, FinishReason.LENGTH)
        case "fault":
            assert (end, tokens) == (FinishReason.ERROR, [])
        case _:
            assert end in (FinishReason.ABORT, FinishReason.LENGTH)


def ways(seed: int, n: int) -> Iterator[tuple[int, str]]:
    rng = random.Random(seed)
    return enumerate([rng.choice(ENDS) for _ in range(n)], 1)


def check_idle(world: Eight) -> None:
    """Check that only the prefix cache has cells."""
    stats = world.engine.stats()
    assert stats.num_running == stats.num_waiting == stats.kv_cells_used == 0
    assert world.context.n_seq_free == N_IDS
    assert stats.kv_cells_free + stats.kv_cells_retained == N_CELLS


@pytest.mark.parametrize("seed", range(5))
def test_twelve_one_after_another(seed: int) -> None:
    world = Eight()
    for i, way in ways(seed, 12):
        world.submit(request_of(i, way, world.now_s))
        cancel_at_stage(world, i, way)
        while world.engine.has_work():
            world.step()
            cancel_at_stage(world, i, way)
        check_end(world, i, way)
        check_idle(world)


@pytest.mark.parametrize("seed", range(5))
def test_twelve_at_once(seed: int) -> None:
    world, plans = Eight(), [*ways(seed, 12)]
    for i, way in plans:
        world.submit(request_of(i, way, world.now_s))
    while world.engine.has_work():
        for i, way in plans:
            cancel_at_stage(world, i, way)
        world.step()
    for i, way in plans:
        check_end(world, i, way)
    check_idle(world)


def test_a_thousand_in_a_loop() -> None:
    world, rng, open_ways = Eight(), random.Random(11), {}
    ends: Counter[FinishReason] = Counter()
    todo = ways(11, 1000)
    left = True
    while left or world.engine.has_work():
        for i, way in islice(todo, rng.randrange(3) if len(open_ways) < 14 else 0):
            world.submit(request_of(i, way, world.now_s))
            open_ways[i] = way
            left = i < 1000
        for i, way in open_ways.items():
            cancel_at_stage(world, i, way)
        world.step()
        for i in [i for i in open_ways if f"{i}" in world.ends]:
            check_end(world, i, open_ways.pop(i))
            ends[world.ends[f"{i}"]] += 1
    check_idle(world)
    assert sum(ends.values()) == 1000
    assert min(ends[end] for end in (*FinishReason,)) > 50


def test_requests_with_equal_prompts_get_equal_tokens() -> None:
    """Requests 4, 8 and 12 run on the same slot, each in a newer generation."""
    world, acquired = Eight(), []
    acquire = world.context.seq_acquire
    world.context.seq_acquire = lambda stream=0: acquired.append(acquire(stream)) or acquired[-1]  # type: ignore[method-assign,func-returns-value]
    for i in range(1, 13):
        world.submit(request_of(i, "length", world.now_s))
        world.run()
    assert world.tokens["4"] == world.tokens["8"] == world.tokens["12"] == alone(12)
    assert len(acquired) == len(set(acquired)) == 12, "each request acquires one id, never the same one"
    assert len({seq_id & 0xFF for seq_id in acquired}) == 1, "the id that was freed last is acquired next"


# --- negative tests: each check fires while the others are switched off ---


def leaking() -> Eight:
    """Return an engine whose releases do nothing, so that ids and cells leak."""
    world = Eight()
    world.context.seq_release = lambda _: None  # type: ignore[method-assign]
    return world


def test_the_check_detects_a_leak_when_the_engine_becomes_idle() -> None:
    world = leaking()
    world.submit(request_of(1, "length", 1000.0))
    for _ in range(N_OUTPUT - 1):
        world.engine.step(world.now_s)
    with pytest.raises((BrokenInvariant, EngineDeadError)):
        world.engine.step(world.now_s)
    assert world.context.n_seq_free == N_IDS - 1


def test_the_admission_detects_a_leak_in_the_step_that_should_admit_the_ninth() -> None:
    """By the count of the engine an id is free, but the core has none."""
    world = leaking()
    world.engine.check = lambda: None  # type: ignore[method-assign]
    for i in range(1, 9):
        world.submit(request_of(i, "length", world.now_s))
        while world.engine.has_work():
            world.engine.step(world.now_s)
    assert world.context.n_seq_free == 0
    world.submit(request_of(9, "length", world.now_s))
    with pytest.raises(BrokenInvariant, match="sequence id"):
        world.engine.step(world.now_s)


def test_a_decode_with_the_batch_index_is_detected_in_the_second_step() -> None:
    """A former bug: the prefill used the acquired id, and the decode used the index in the batch."""
    world = Eight()
    world.submit(request_of(1, "length", world.now_s))
    world.run()
    decode = world.context.decode

    def confused(tokens: Any, positions: Any, n_seq_id: Any, seq_ids: Any, wants: Any) -> Any:
        return decode(tokens, positions, n_seq_id, seq_ids * 0 if len(tokens) == 1 else seq_ids, wants)

    world.context.decode = confused  # type: ignore[method-assign]
    world.submit(request_of(2, "length", world.now_s))
    world.step()
    (output,) = world.step()
    assert output.finish_reason is FinishReason.ERROR
    assert "sequence" in str(output.error)
