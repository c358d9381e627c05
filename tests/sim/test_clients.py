"""Clients with shares in the simulated world: no client starves, for any load of the others.

SIM_SEED=13 pytest tests/sim/test_clients.py     runs that seed alone
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from sim.clients import ClientWorld, client_mix

N_SEEDS, N_REQUESTS = 20, 200


def test_no_client_below_its_share_is_starved() -> None:
    """Check the rules of `ClientWorld` and of `World`.

    So tokens are those of a request alone, and no valid request fails. The oldest request is not preempted,
    and no request is preempted more than three times.
    """
    chosen = os.environ.get("SIM_SEED")
    n_for_shares = n_preempted = 0
    for seed in range(N_SEEDS) if chosen is None else [int(chosen)]:
        world = ClientWorld(seed, client_mix(seed, N_REQUESTS))
        try:
            world.run()
        except BaseException:
            print(f"seed {seed} fails in step {world.n_steps}; replay: SIM_SEED={seed} pytest {__file__}")
            raise
        n_for_shares += world.n_for_shares
        n_preempted += world.engine.stats().num_preempted
        print(f"seed {seed}: {world.n_steps} steps, {world.n_for_shares} preempted for a share")
    if chosen is None:
        assert n_for_shares > 50
        assert n_preempted > n_for_shares + 50


@pytest.mark.parametrize("seed", [0, 4])
def test_a_scheduler_without_shares_is_detected(seed: int) -> None:
    world = ClientWorld(seed, client_mix(seed, N_REQUESTS))
    world.engine.limits = replace(world.limits, n_clients=1)
    with pytest.raises(AssertionError, match="clients below their share wait"):
        world.run()
