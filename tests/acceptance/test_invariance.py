"""A request gets the same bits of tokens and logprobs whatever happens around it.

It runs alone, in a batch, in any order, in chunks, preempted, with a cached prefix, in scattered cells, in
several KV streams, and on any number of threads. With the NaN fill, a read of a free cell shows as NaN.
"""

from __future__ import annotations

import pytest

from golden import Golden
from invariance import ALONE, SEED, SETTINGS, Answers, Model, run

pytestmark = [pytest.mark.stage1, pytest.mark.two_cpus]


@pytest.fixture(scope="module")
def alone(golden: Golden) -> Answers:
    """Run each request alone."""
    return run(Model(golden), ALONE)[0]


@pytest.mark.parametrize("name", [*SETTINGS])
def test_the_same_bits(golden: Golden, alone: Answers, name: str) -> None:
    setting = SETTINGS[name]
    answers, stats = run(Model(golden), setting)
    wrong = [key for key, want in alone.items() if answers.get(key) != want]
    assert answers.keys() == alone.keys()
    assert not wrong, f"seed {SEED}: {len(wrong)} choices differ, the first is {wrong[0]}"
    if name.startswith("preempted"):
        assert stats.num_preempted > 0
    if setting.limits.get("enable_prefix_caching", True):
        assert stats.prefix_hit_tokens > 0
    if name == "prefixes evicted":
        assert stats.num_evicted_cells > 0
