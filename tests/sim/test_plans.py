"""The plans of all steps equal those recorded in tests/data/plans.txt: no change of the scheduling.

SIM_PLANS=all pytest tests/sim/test_plans.py     compares all 800 worlds instead of a sample
"""

from __future__ import annotations

import os

import pytest

from sim.plans import FILE, Line, digest

N_SAMPLED = 8  # of each kind of world


def recorded(kind: str) -> list[Line]:
    """Return the lines of one kind of world, by seed."""
    lines = [line.split() for line in FILE.read_text("utf-8").splitlines()]
    return [
        (name, int(seed), int(plans), int(steps), sha)
        for name, seed, plans, steps, sha in lines
        if name == kind
    ]


@pytest.mark.parametrize("kind", ["world", "sessions", "clients"])
def test_plans_are_those_recorded(kind: str) -> None:
    lines = recorded(kind)
    chosen = lines if os.environ.get("SIM_PLANS") == "all" else lines[:N_SAMPLED]
    for line in chosen:
        assert digest(kind, line[1]) == line
