"""A digest of all decisions of the scheduler in a simulated world, to compare two versions of it.

    cd tests && PYTHONPATH=. python -m sim.plans > data/plans.txt     computes all digests again

A line is: kind of world, seed, number of plans, steps, digest. Compute them again only for an intended change
of the scheduling.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.scheduler import SchedulerOutput, SchedulerView
from llaisys.engine.step_speed import StepSpeed
from sim.clients import ClientWorld, client_mix
from sim.sessions import SessionWorld
from sim.world import World, mix_of

FILE = Path(__file__).parents[1] / "data" / "plans.txt"
N_REQUESTS = 120  # of each world
N_SEEDS = {"world": 400, "sessions": 200, "clients": 200}
Line = tuple[str, int, int, int, str]


def make_world(kind: str, seed: int) -> World:
    """Return the world of a seed; some seeds have token quotas for clients and a short maximum wait."""
    if kind == "clients":
        return ClientWorld(seed, client_mix(seed, N_REQUESTS))
    mix = mix_of(seed, N_REQUESTS)
    world = SessionWorld(seed, replace(mix, prefix_caching=True)) if kind == "sessions" else World(seed, mix)
    limits = world.limits
    if seed % 4 == 1:
        limits = replace(limits, max_client_tokens_per_step=48)
    if seed % 5 == 2:
        limits = replace(limits, max_queue_wait_s=0.3)
    world.limits = world.engine.limits = limits
    return world


def speed_of(kind: str, seed: int, n_plans: int) -> StepSpeed:
    """Return a fixed speed, so that plans do not depend on this machine."""
    if kind == "clients" or seed % 3:
        return StepSpeed()
    return StepSpeed(0.2, (0.0004, 0.001, 0.004)[n_plans // 50 % 3])


def digest(kind: str, seed: int) -> Line:
    """Run a world to its end; digest each plan and each output in their order."""
    world, sha, n_plans = make_world(kind, seed), hashlib.sha256(), 0
    plan, take = world._plan, world._take

    def planned(view: SchedulerView) -> SchedulerOutput:
        nonlocal n_plans
        output = plan(replace(view, speed=speed_of(kind, seed, n_plans)))
        n_plans += 1
        sha.update(repr(decisions(output)).encode())
        return output

    def taken(output: EngineOutput) -> None:
        reason = None if output.finish_reason is None else output.finish_reason.value
        sha.update(repr((output.request_id, output.index, output.new_token_ids, reason)).encode())
        take(output)

    world._plan, world._take = planned, taken  # type: ignore[method-assign]
    world.run()
    return kind, seed, n_plans, world.n_steps, sha.hexdigest()[:16]


def decisions(output: SchedulerOutput) -> tuple[object, ...]:
    """Return a plan as tuples, so that no name of a class or field is part of the digest."""
    return (
        output.expire,
        output.preempt,
        output.n_free_wanted,
        tuple((a.ordinal, a.stream, a.n_cached, a.source, a.fork) for a in output.admit),
        output.decode,
        tuple((c.ordinal, c.start, c.n_tokens, c.samples) for c in output.chunks),
        output.without_cells,
        output.lacks_cells,
        output.round_robin.deficits,
        output.scanned_deadlines,
        output.cleaned_cache,
    )


def main() -> None:
    for kind, n_seeds in N_SEEDS.items():
        for seed in range(n_seeds):
            print(*digest(kind, seed))


if __name__ == "__main__":
    main()
