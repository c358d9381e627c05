"""The savings of batching and prefix reuse in steps and rows, exact, with the real KvCache."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from fakes.asks import ask, limits
from fakes.core import SamplerSpec
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import Worker
from sim.context import SimContext, answer

N_SEQS = 16


def engine_of(**changes: Any) -> tuple[LLMEngine, SimContext]:
    """Return an engine with capacity for sixteen sequences, and its context."""
    bounds = limits(
        **{
            "max_num_seqs": N_SEQS,
            "max_num_batched_tokens": 2048,
            "max_num_queued_reqs": 1000,
            "max_model_len": 1024,
            "n_cells": N_SEQS * 1024,
            **changes,
        }
    )
    context = SimContext(n_cells=bounds.n_cells, n_seq_max=N_SEQS)
    return LLMEngine(Executor(Worker(context, SamplerSpec)), bounds, 0), context  # type: ignore[arg-type]


def finish(engine: LLMEngine) -> tuple[int, list[EngineOutput]]:
    """Run until no request is open; return the number of steps and all outputs."""
    n_steps, outputs = 0, []
    while engine.has_work():
        outputs += engine.step(1000.0)
        n_steps += 1
    return n_steps, outputs


def tokens_of(outputs: list[EngineOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.new_token_ids]


# --- continuous batching ---


def crowd(seed: int) -> list[EngineRequest]:
    """Return 320 requests of random lengths."""
    rng = random.Random(seed)
    return [
        ask(f"{i}", [rng.randrange(256) for _ in range(rng.randint(1, 96))], max_tokens=rng.randint(1, 64))
        for i in range(320)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_continuous_batching_needs_fewer_steps_than_static_batches(seed: int) -> None:
    engine, _ = engine_of(enable_prefix_caching=False)
    for request in crowd(seed):
        engine.submit(request)
    n_continuous, _ = finish(engine)

    engine, _ = engine_of(enable_prefix_caching=False)
    requests, n_static = iter(crowd(seed)), 0
    while batch := [*islice(requests, N_SEQS)]:
        for request in batch:
            engine.submit(request)
        n_static += finish(engine)[0]
    print(f"seed {seed}: {n_static} steps in static batches, {n_continuous} in continuous ones")
    assert n_static >= 1.5 * n_continuous


# --- prefix reuse ---


def chat(n_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n_tokens)]


def ask_for(
    engine: LLMEngine, context: SimContext, prompt: list[int], **facts: Any
) -> tuple[int, list[int], int]:
    """Run a request; return the rows computed, its tokens, and the number of cached tokens."""
    n_before = context.n_rows
    engine.submit(ask("r", prompt, max_tokens=8, **facts))
    _, outputs = finish(engine)
    engine.check()
    want = [*islice(answer(prompt, SamplerSpec(temperature=0.0)), 8)]
    assert tokens_of(outputs) == want
    return context.n_rows - n_before, want, max(output.num_cached_tokens for output in outputs)


def test_an_edit_computes_only_the_tokens_after_it() -> None:
    engine, context = engine_of()
    prompt = chat(500)
    n_rows, _, n_cached = ask_for(engine, context, prompt)
    assert (n_rows, n_cached) == (500 + 7, 0)  # the last of eight tokens needs no row
    for at in (499, 480, 250, 1):
        edited = [*prompt[:at], (prompt[at] + 1) % 256, *prompt[at + 1 :]]
        n_rows, _, n_cached = ask_for(engine, context, edited)
        assert (n_rows, n_cached) == (500 - at + 7, at)


def test_the_next_turn_computes_only_its_new_tokens() -> None:
    engine, context = engine_of()
    prompt = chat(300)
    _, first, _ = ask_for(engine, context, prompt)
    turn = [*prompt, *first, *chat(20, seed=1)]
    n_rows, _, n_cached = ask_for(engine, context, turn)
    assert (n_rows, n_cached) == (1 + 20 + 7, 300 + 7)


def test_a_repeated_prompt_computes_only_its_last_token() -> None:
    engine, context = engine_of()
    prompt = chat(300)
    for n_new in (300, 1, 1):
        assert ask_for(engine, context, prompt)[0] == n_new + 7


def test_another_salt_computes_everything() -> None:
    engine, context = engine_of()
    prompt = chat(300)
    for salt in ("a", "b"):
        assert ask_for(engine, context, prompt, cache_salt=salt)[::2] == (307, 0)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_share_the_prompt_and_copy_nothing(prefix_caching: bool) -> None:
    engine, context = engine_of(enable_prefix_caching=prefix_caching)
    prompt = chat(400)
    engine.submit(ask("r", prompt, max_tokens=8, n=8, temperature=1.0, seed=5))
    n_used, outputs = 0, []
    while engine.has_work():
        outputs += engine.step(1000.0)
        n_used = max(n_used, context.n_cells - context.n_cells_free)
    assert context.n_rows == 400 + 7 + 7 * (1 + 7)
    assert n_used <= 400 + 8 * 8
    for index in range(8):
        spec = SamplerSpec(temperature=1.0, seed=5, choice=index)
        assert tokens_of(outputs, index) == [*islice(answer(prompt, spec), 8)]


def test_the_prompt_of_a_running_request_is_shared_at_once() -> None:
    """Of ten requests with one prompt, a step apart, the first computes it, the others its last token."""
    engine, context = engine_of()
    prompt = chat(200)
    for i in range(10):
        engine.submit(ask(f"{i}", prompt, max_tokens=8))
        engine.step(1000.0)
    finish(engine)
    assert context.n_rows == 200 + 7 + 9 * (1 + 7)


def test_the_cells_of_a_canceled_request_are_free_one_step_later() -> None:
    """It is canceled in the queue, during the prefill, and during decoding."""
    engine, context = engine_of(enable_prefix_caching=False, max_num_batched_tokens=32)
    for n_steps in (0, 1, 3, 4, 10):
        engine.submit(ask("r", chat(100), max_tokens=64))
        for _ in range(n_steps):
            engine.step(1000.0)
        engine.cancel("r")
        engine.step(1000.0)
        assert context.n_cells_free == context.n_cells
        assert context.n_seq_free == N_SEQS


def test_the_cells_of_a_canceled_request_are_free_while_others_run() -> None:
    engine, context = engine_of(enable_prefix_caching=False)
    for i in range(8):
        engine.submit(ask(f"{i}", chat(100, seed=i), max_tokens=64))
    for i in range(8):
        engine.step(1000.0)
        engine.cancel(f"{i}")
        engine.step(1000.0)
        n_others, n_steps = 7 - i, 2 * (i + 1)
        assert context.n_cells - context.n_cells_free == n_others * (100 + n_steps - 1)
