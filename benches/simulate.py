"""Measure simulated requests per minute on one core: real scheduler, prefix cache and KvCache, no kernels.

    python benches/simulate.py [--requests 20000]

The mix is that of tests/sim: prompts of 1 to 256 tokens, outputs of 1 to 64, aborts, timeouts, priorities,
choices, shared prefixes and failures. Half of the seeds lack cells, and every plan is checked. Prints one
JSON line; the time is CPU time, so other work on the machine does not count. Goal: 100,000.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from peers import cpu_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from sim.world import World, mix_of

N_SEEDS = 20


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    n_requests = parser.parse_args().requests
    logging.disable(logging.WARNING)  # each injected failure logs one
    n_steps = n_done = 0
    start_s = time.process_time()
    for seed in range(N_SEEDS):
        world = World(seed, mix_of(seed, n_requests // N_SEEDS))
        world.run()
        n_steps += world.n_steps
        n_done += world.n_arrived
    seconds = time.process_time() - start_s
    print(
        json.dumps(
            {
                "bench": "simulate",
                "cpu": cpu_name(),
                "requests": n_done,
                "steps": n_steps,
                "cpu_s": round(seconds, 2),
                "requests_per_minute": round(60 * n_done / seconds),
            }
        )
    )


if __name__ == "__main__":
    main()
