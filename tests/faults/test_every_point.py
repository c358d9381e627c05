"""Every call into the core fails once, at every point of a run of eight requests.

In one scene, requests have drafts, and the faults are in steps that verify some.

A fault that the core can undo fails one request at most, and the others keep their bits. Any other fault ends
the engine, and with it every request exactly once.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

import crowd
from crowd import VOCAB_SIZE, Answers, check_answers
from fakes.drafts import ScriptedSpeculator
from llaisys.engine.request import Request
from llaisys.engine.step_speed import DecodeStep
from llaisys.errors import EngineDeadError
from llaisys.outputs import FinishReason

SOURCE = Path(__file__).parents[2] / "crates" / "llaisys-core" / "src"
# The faults of each point. `entry`: error or panic; `inside`: panic; `lost`: a panic that ends the core.
POINTS = {
    "seq.acquire": "entry",
    "seq.release": "entry",
    "seq.set_sampler": "entry",
    "decode.begin": "entry",
    "decode.prepare": "entry",
    "decode.placed": "entry",
    "decode.layer": "inside",
    "decode.forward": "entry",
    "decode.logits": "entry",
    "sampler.row": "inside",
    "decode.sampled": "entry",
    "decode.commit": "entry",
    "kv.seq_cp": "entry",
    "kv.node_cache": "entry",
    "kv.node_attach": "entry",
    "kv.node_relink": "entry",
    "kv.node_split": "entry",
    "kv.node_trim": "entry",
    "kv.change": "lost",
    "kv.prepare": "lost",
    "kv.commit": "lost",
}
# Points of test_session_transfer.py.
SESSIONS = {"kv.node_export", "kv.node_import"}
# The point of test_ranks.py.
RANKS = {"decode.rank"}
# Calls that the engine does not make for this model; a Rust test covers them, `test_seam.py` those for
# recurrent layers, and `test_lora.py` (parity) those for adapters.
UNUSED = {
    "kv.seq_keep",
    "kv.seq_add",
    "kv.seq_rm",
    "kv.node_keep_state",
    "kv.node_drop_state",
    "kv.node_export_state",
    "kv.node_import_state",
    "lora.load",
    "lora.unload",
    "seq.set_lora",
    "weights.replace",
}
DRAFTS = "drafts"
SCENES = {
    "one stream": crowd.bounds(prefix=True),
    "two streams": crowd.bounds(prefix=True, n_streams=2),
    "no prefix cache": crowd.bounds(prefix=False),
    DRAFTS: crowd.bounds(prefix=True),
}
# The number of passes of a point that fail, evenly spaced from the first to the last.
N_PASSES = int(os.environ.get("FAULT_PASSES", "8"))
# As above, of the passes in steps that verify drafts.
N_PASSES_DRAFTS = 6
# Steps that admit a request or preempt one verify no drafts; these points are only in such steps.
ADMITTING = {"seq.acquire", "seq.set_sampler", "kv.seq_cp", "kv.node_attach", "kv.node_split"}
WITH_DRAFTS = set(POINTS) - ADMITTING - {"kv.node_relink", "kv.node_trim"}
CASES = [
    (scene, point, action)
    for scene in SCENES
    for point, kind in POINTS.items()
    if scene != DRAFTS or point in WITH_DRAFTS
    for action in (("error", "panic") if kind == "entry" else ("panic",))
]


class Drafts(ScriptedSpeculator):
    """Drafts from the outputs of a run without faults. `passes`: by point, the passes in steps that verified
    drafts, counted from the beginning."""

    def __init__(self, core: ModuleType, known: Answers) -> None:
        super().__init__(1, VOCAB_SIZE, lambda request, n: _following(known, request, n))
        self._core = core
        self._before = self._step_began = hits(core)
        self._has_verified = False
        self.passes: dict[str, list[int]] = defaultdict(list)

    def propose(
        self, running: Sequence[Request], n_slots: int, last_step: DecodeStep | None
    ) -> dict[int, list[int]]:
        now = hits(self._core)
        if self._has_verified:
            for point, n in now.items():
                self.passes[point] += range(
                    self._step_began[point] - self._before[point] + 1, n - self._before[point] + 1
                )
        self._step_began, self._has_verified = now, False
        return super().propose(running, n_slots, last_step)

    def record_accepted(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        super().record_accepted(request, n_drafts, n_accepted)
        self._has_verified = True


def _following(known: Answers, request: Request, n: int) -> list[int]:
    entries = known.tokens[request.request_id, request.index][request.num_output : request.num_output + n]
    return [getattr(entry, "token_id", entry) for entry in entries]


def run(core: ModuleType, scene: str, drafts: Drafts | None = None) -> Answers:
    limits = SCENES[scene]
    context = crowd.context_of(core, limits)
    try:
        engine = crowd.make_engine(context, core.SamplerSpec, limits)
        engine._speculator = drafts  # type: ignore[assignment]
        return crowd.run(engine, context)
    finally:
        context.close()


def hits(core: ModuleType) -> dict[str, int]:
    return {point: core.fault_hits(point) for point in core.fault_points()}


Good: TypeAlias = Callable[[str], tuple[Answers, dict[str, list[int]]]]


@pytest.fixture(scope="module")
def good(faulty_core: ModuleType) -> Good:
    """Return the outputs of a scene without faults, and its passes of each point, from 1.

    With drafts, only the passes in steps that verify some.
    """
    made: dict[str, tuple[Answers, dict[str, list[int]]]] = {}
    for scene in SCENES:
        before = hits(faulty_core)
        drafts = Drafts(faulty_core, made["one stream"][0]) if scene == DRAFTS else None
        answers = run(faulty_core, scene, drafts)
        n_passed = {point: n - before[point] for point, n in hits(faulty_core).items()}
        passes = {point: [*range(1, n + 1)] for point, n in n_passed.items()}
        made[scene] = answers, passes if drafts is None else drafts.passes
    return made.__getitem__


def test_the_table_the_source_and_the_runs_name_the_same_points(core: ModuleType, good: Good) -> None:
    text = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.rs"))
    in_source = set(re.findall(r'(?:fault_point!\((?:panic )?|table::hit\()"([a-z_.]+)"', text))
    assert set(POINTS) | SESSIONS | RANKS | UNUSED == set(core.fault_points()) == in_source
    assert {point for scene in SCENES for point, n in good(scene)[1].items() if n} == set(POINTS)
    assert {point for point, n in good(DRAFTS)[1].items() if n} == WITH_DRAFTS


def test_the_runs_cover_every_event_and_agree(
    good: Good,
) -> None:
    want = good("one stream")[0]
    for scene in SCENES:
        answers = good(scene)[0]
        assert not answers.failed()
        check_answers(answers, want)
        assert answers.n_together == 8
        assert answers.ends["gone", 0].finish_reason is FinishReason.ABORT
        assert answers.tokens["gone", 0], "the canceled request had begun"
        assert answers.stats.num_preempted > 0
        assert answers.stats.prefix_hit_tokens > 0
        assert answers.stats.num_evicted_cells > 0 or scene == "no prefix cache"


@pytest.mark.parametrize(("scene", "point", "action"), CASES)
def test_a_fault_costs_one_request_at_most_or_ends_the_engine(
    core: ModuleType,
    good: Good,
    scene: str,
    point: str,
    action: str,
) -> None:
    want, passed = good(scene)
    passes = passed[point]
    n = min(N_PASSES_DRAFTS if scene == DRAFTS else N_PASSES, len(passes))
    for nth in sorted({passes[i * (len(passes) - 1) // max(n - 1, 1)] for i in range(n)}):
        drafts = Drafts(core, want) if scene == DRAFTS else None
        before = core.fault_hits(point)
        core.set_fault(point, action, nth)
        if POINTS[point] == "lost":
            with pytest.raises(EngineDeadError, match=re.escape(point)):
                run(core, scene, drafts)
        else:
            check_answers(run(core, scene, drafts), want)
        assert core.fault_hits(point) - before >= nth, "the fault did not happen"
