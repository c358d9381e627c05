"""Every call of a Worker into its context fails once, at every moment of a run of eight requests.

It is the counterpart of tests/faults/test_every_point.py on the Python side of the binding.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import crowd
from crowd import Answers, check_answers
from fakes.core import SamplerSpec
from llaisys.engine.limits import Limits
from llaisys.engine.request import BrokenInvariant
from llaisys.errors import CoreFaultError, EngineDeadError, RejectedError
from sim.context import SimContext

SCENES = {
    "one stream": crowd.bounds(prefix=True),
    "two streams": crowd.bounds(prefix=True, n_streams=2),
    "no prefix cache": crowd.bounds(prefix=False),
    "recurrent layers": crowd.bounds(prefix=True, n_states_kept=2),
}
QUERIES = {"n_cells_free", "n_cells_free_in", "n_seq_free", "n_states_kept"}
CHANGES = {
    "seq_release",
    "kv_seq_cp",
    "kv_node_cache",
    "kv_node_attach",
    "kv_node_relink",
    "kv_node_keep_state",
    "kv_node_drop_state",
    "kv_node_split",
    "kv_node_trim",
}
MAY_REFUSE = {"seq_acquire", "set_sampler", "decode"}


class Seam:
    """A context whose method `name` fails with `error` from its `k`-th call on, `times` times."""

    def __init__(
        self, limits: Limits, name: str = "", k: int = 0, error: Exception | None = None, times: int = 1
    ) -> None:
        self._context = SimContext(
            n_cells=limits.n_cells,
            n_seq_max=limits.max_num_seqs,
            n_streams=limits.n_streams,
            lifo=True,
            n_states_kept=limits.n_states_kept or None,
        )
        self._fault = name, range(k, k + times), error
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._context, name)
        if not callable(target):
            self._ask(name)
            return target

        def call(*arguments: Any) -> Any:
            self._ask(name)
            return target(*arguments)

        return call

    def _ask(self, name: str) -> None:
        at, when, error = self._fault
        self.asked[name] += 1
        if name == at and self.asked[name] in when and error is not None:
            raise error


def run(scene: str, *fault: Any) -> tuple[Answers, Counter[str]]:
    context = Seam(SCENES[scene], *fault)
    answers = crowd.run(crowd.make_engine(context, SamplerSpec, SCENES[scene]), context)
    return answers, Counter(
        {name: n for name, n in context.asked.items() if name in QUERIES | CHANGES | MAY_REFUSE}
    )


def test_all_calls_are_covered() -> None:
    asked = {name for scene in SCENES for name in run(scene)[1]}
    assert asked == QUERIES | CHANGES | MAY_REFUSE


@pytest.mark.parametrize("scene", SCENES)
def test_a_failed_call_without_effect_fails_one_request_at_most(scene: str) -> None:
    want, asked = run(scene)
    n_failed = 0
    for name in (CHANGES | MAY_REFUSE) & set(asked):
        for k in range(1, asked[name] + 1):
            answers, _ = run(scene, name, k, CoreFaultError("made to fail"))
            check_answers(answers, want)
            assert not answers.failed() or name in MAY_REFUSE
            n_failed += len(answers.failed())
    assert n_failed > 0, "a request that cannot be admitted fails"


@pytest.mark.parametrize("scene", SCENES)
def test_a_lost_core_ends_the_engine(scene: str) -> None:
    _, asked = run(scene)
    for name, n in asked.items():
        for k in range(1, n + 1, 1 if name in CHANGES | MAY_REFUSE else 11):
            with pytest.raises(EngineDeadError, match="made to die"):
                run(scene, name, k, EngineDeadError("made to die"))


@pytest.mark.parametrize("scene", SCENES)
def test_a_change_that_fails_twice_or_is_rejected_ends_the_engine(scene: str) -> None:
    """The prefix cache then disagrees with the cells, so no request may use either."""
    _, asked = run(scene)
    for name in CHANGES & set(asked):
        for k in (1, asked[name]):
            with pytest.raises(EngineDeadError, match="failed twice"):
                run(scene, name, k, CoreFaultError("made to fail"), 2)
            with pytest.raises((RejectedError, BrokenInvariant)):
                run(scene, name, k, RejectedError("made to fail"))
