"""A failing rank fails one request at most, as any fault of a step, and the other ranks do not hang."""

from __future__ import annotations

from types import ModuleType

import pytest

import crowd
from crowd import Answers, check_answers

LIMITS = crowd.bounds(prefix=True)
# The number of passes that fail.
N_PASSES = 5


def run(core: ModuleType) -> Answers:
    context = crowd.context_of(core, LIMITS, n_ranks=2)
    try:
        return crowd.run(crowd.make_engine(context, core.SamplerSpec, LIMITS), context)
    finally:
        context.close()


@pytest.fixture(scope="module")
def good(faulty_core: ModuleType) -> tuple[Answers, int]:
    """Return the outputs of a run on two ranks without faults, and how often the second begins a pass."""
    before = faulty_core.fault_hits("decode.rank")
    answers = run(faulty_core)
    return answers, faulty_core.fault_hits("decode.rank") - before


@pytest.mark.parametrize("action", ["error", "panic"])
def test_a_failing_rank_fails_one_request_at_most(
    core: ModuleType, good: tuple[Answers, int], action: str
) -> None:
    want, n_passed = good
    assert n_passed > N_PASSES
    for i in range(N_PASSES):
        nth = 1 + i * (n_passed - 1) // (N_PASSES - 1)
        before = core.fault_hits("decode.rank")
        core.set_fault("decode.rank", action, nth)
        check_answers(run(core), want)
        assert core.fault_hits("decode.rank") - before >= nth, "it has not failed"
