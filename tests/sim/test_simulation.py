"""Random requests through the real scheduler, prefix cache and KvCache; failures replay from their seed.

SIM_SEED=13 pytest tests/sim/test_simulation.py     runs that seed alone
SIM_SEEDS=20 pytest tests/sim/test_simulation.py    20,000 requests, as `make test-long` does
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llaisys.engine import prefix_tree
from llaisys.engine.scheduler import Scheduler, SchedulerOutput, SchedulerView
from sim.drafts import DraftWorld
from sim.sessions import SessionWorld
from sim.world import Mix, World, mix_of, output_length, prompt_length

N_SEEDS = int(os.environ.get("SIM_SEEDS", "6"))
N_REQUESTS = 1000  # of each seed


def seeds() -> list[int]:
    chosen = os.environ.get("SIM_SEED")
    return [*range(N_SEEDS)] if chosen is None else [int(chosen)]


def run(seed: int, mix: Mix, kind: type[World] = World) -> World:
    world = kind(seed, mix)
    try:
        world.run()
    except BaseException:
        print(f"seed {seed} fails in step {world.n_steps}; replay: SIM_SEED={seed} pytest {__file__}")
        raise
    return world


def test_the_mix_has_the_documented_averages() -> None:
    rng = random.Random(0)
    prompts = [prompt_length(rng) for _ in range(20_000)]
    outputs = [output_length(rng) for _ in range(20_000)]
    assert (min(prompts), max(prompts)) == (1, 256)
    assert (min(outputs), max(outputs)) == (1, 64)
    assert abs(sum(prompts) / 20_000 - 48) < 1
    assert abs(sum(outputs) / 20_000 - 16) < 0.5
    assert sum(mix_of(seed, 1).n_cells / mix_of(seed, 1).n_streams < 500 for seed in range(20)) == 10


def test_random_requests() -> None:
    ends: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in seeds():
        world = run(seed, mix_of(seed, N_REQUESTS))
        stats = world.engine.stats()
        ends.update(world.n_ended)
        totals.update(
            requests=world.n_arrived,
            refused=world.n_refused,
            preempted=stats.num_preempted,
            evicted=stats.num_evicted_cells,
            hits=stats.prefix_hit_tokens,
            cancels=world.n_cancels,
        )
        print(f"seed {seed}: {world.n_steps} steps, ends {world.n_ended}, trace {world.trace:08x}")
    if len(seeds()) >= 20:  # everything that can happen has happened
        assert totals["requests"] == N_SEEDS * N_REQUESTS
        assert totals["cancels"] >= 0.1 * totals["requests"]
        assert totals["preempted"] > 50
        assert min(totals[what] for what in ("refused", "evicted", "hits")) > 500
        assert min(ends[reason] for reason in ("stop", "length", "abort", "timeout", "error")) > 100


def test_drafts_change_no_token() -> None:
    """Right, wrong and random drafts, with preemption, cancels and short cells: `World` checks the tokens."""
    totals: Counter[str] = Counter()
    for seed in seeds():
        world = run(seed, mix_of(seed, N_REQUESTS), DraftWorld)
        assert isinstance(world, DraftWorld)
        stats = world.engine.stats()
        totals.update(accepted=world.speculator.n_accepted, rejected=world.speculator.n_rejected)
        totals.update(preempted=stats.num_preempted, cancels=world.n_cancels)
        print(f"seed {seed}: {world.n_steps} steps, ends {world.n_ended}, {dict(totals)}")
    if len(seeds()) >= N_SEEDS:
        assert min(totals["accepted"], totals["rejected"]) > 1000
        assert min(totals.values()) > 10


def test_recurrent_states_change_no_token() -> None:
    """Few and many kept states, preemption, choices and short cells: `World` checks the tokens."""
    totals: Counter[str] = Counter()
    for seed in seeds():
        mix = replace(mix_of(seed, N_REQUESTS), n_states=(1, 4, 64)[seed % 3], prefix_caching=True)
        world = run(seed, mix)
        stats = world.engine.stats()
        hits = stats.prefix_hit_tokens
        totals.update(hits=hits, preempted=stats.num_preempted, evicted=stats.num_evicted_cells)
        print(f"seed {seed}: {world.n_steps} steps, ends {world.n_ended}, {hits} hits, {totals}")
        assert hits > 0 or mix.n_states == 1  # a single state can be replaced before it is used again
        assert world.context.n_states_kept > 0
        assert world.engine.reset_prefix_cache()
        world.engine.check()
        assert world.context.n_states_kept == 0, "a state is leaked"
    if len(seeds()) >= N_SEEDS:
        assert min(totals.values()) > 10


def test_sessions_under_pressure() -> None:
    """Pins are released before a request is preempted, and sessions keep the correct tokens.

    Every third seed has a model with recurrent layers.
    """
    calls: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in seeds():
        n_states = 24 if seed % 3 == 2 else None
        mix = replace(mix_of(seed, 250), prefix_caching=True, n_states=n_states)
        world = run(seed, mix, SessionWorld)
        assert isinstance(world, SessionWorld)
        calls.update(world.n_calls)
        stats = world.engine.stats()
        totals.update(lost=world.n_lost_pins, hits=stats.prefix_hit_tokens, preempted=stats.num_preempted)
        print(f"seed {seed}: {world.n_steps} steps, calls {world.n_calls}, {world.n_lost_pins} pins lost")
    if len(seeds()) >= 20:
        assert min(calls[kind] for kind in ("create", "fork", "trim", "delete", "list")) > 50
        assert min(totals.values()) > 10


@pytest.mark.parametrize("seed", [0, 3, 7, 13])
def test_equal_seeds_give_equal_traces(seed: int) -> None:
    traces = {run(seed, mix_of(seed, 200)).trace for _ in range(2)}
    assert len(traces) == 1
    assert run(seed + 100, mix_of(seed, 200)).trace not in traces


# --- negative tests: each of these worlds has one fault, which is detected ---


def leak(world: World, _: pytest.MonkeyPatch) -> None:
    """Make ended sequences keep their ids and cells."""
    world.context.seq_release = lambda _: None  # type: ignore[method-assign]


def trust_the_first_token(_: World, patch: pytest.MonkeyPatch) -> None:
    """Do not compare a prefix hit token by token."""
    patch.setattr(prefix_tree, "n_common", lambda a, b: min(len(a), len(b)))


def restart_the_draws(world: World, _: pytest.MonkeyPatch) -> None:
    """Make a preempted request restart its random numbers."""
    set_sampler = world.context.set_sampler
    world.context.set_sampler = lambda i, spec, prompt, output: set_sampler(i, spec, prompt, output[:0])  # type: ignore[method-assign]


def be_late(world: World, _: pytest.MonkeyPatch) -> None:
    """Make the engine check deadlines less often than the world expects."""
    world.limits = replace(world.limits, timeout_scan_s=0.0)


class PreemptsTheOldest(Scheduler):
    """Preempts the first request in queue order instead of the last."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        output = super().schedule(view)
        stayed = [r.ordinal for r in view.running if r.ordinal not in output.expire]
        return replace(output, preempt=(stayed[0], *output.preempt[1:])) if output.preempt else output


def preempt_the_oldest(world: World, _: pytest.MonkeyPatch) -> None:
    """Preempt the first request in queue order instead of the last."""
    world.scheduler = PreemptsTheOldest()


def swap_rows(world: World, _: pytest.MonkeyPatch) -> None:
    """Swap the rows of two sequences, as if they were computed by batch index."""
    decode = world.context.decode

    def swapped(tokens: Any, positions: Any, n_seq_id: Any, seq_ids: Any, wants: Any) -> Any:
        ids = seq_ids.copy()
        if len(ids) > 1 and positions[0] == positions[1] and ids[0] != ids[1]:
            ids[[0, 1]] = ids[[1, 0]]
        return decode(tokens, positions, n_seq_id, ids, wants)

    world.context.decode = swapped  # type: ignore[method-assign]


WRONG_TOKENS = "the tokens differ from those of the request alone"


@pytest.mark.parametrize(
    ("add_fault", "detected"),
    [
        (leak, "a sequence id is lost"),
        (trust_the_first_token, WRONG_TOKENS),
        (restart_the_draws, WRONG_TOKENS),
        (be_late, "ended long after its deadline"),
        (preempt_the_oldest, "the oldest was preempted"),
        (swap_rows, WRONG_TOKENS),
    ],
)
def test_each_fault_is_detected_by_its_check(
    add_fault: Callable[[World, pytest.MonkeyPatch], None], detected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(19, Mix(1000, n_cells=352, load=0.75, deadlines=0.3))
    add_fault(world, monkeypatch)
    with pytest.raises(AssertionError, match=detected):
        world.run()


def test_a_correct_world_passes() -> None:
    World(19, Mix(1000, n_cells=352, load=0.75, deadlines=0.3)).run()
