"""Every call into the core fails once, at every point of a run of eight requests.

A fault that the core can undo fails one request at most, and the others keep their bits. Any other fault ends
the engine, and with it every request exactly once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import crowd
from crowd import Answers, check_answers
from llaisys.engine.limits import Limits
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
    "kv.seq_rm": "entry",
    "kv.seq_cp": "entry",
    "kv.node_cache": "entry",
    "kv.node_attach": "entry",
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
# Calls that the engine does not make; a Rust test covers them.
UNUSED_BY_ENGINE = {"kv.seq_keep", "kv.seq_add", "weights.replace"}
SCENES = {
    "one stream": crowd.bounds(prefix=True),
    "two streams": crowd.bounds(prefix=True, n_streams=2),
    "no prefix cache": crowd.bounds(prefix=False),
}
# The number of passes of a point that fail, evenly spaced from the first to the last.
N_PASSES = 24
CASES = [
    (scene, point, action)
    for scene in SCENES
    for point, kind in POINTS.items()
    for action in (("error", "panic") if kind == "entry" else ("panic",))
]


def run(core: ModuleType, limits: Limits) -> Answers:
    context = crowd.context_of(core, limits)
    try:
        return crowd.run(crowd.make_engine(context, core.SamplerSpec, limits), context)
    finally:
        context.close()


def hits(core: ModuleType) -> dict[str, int]:
    return {point: core.fault_hits(point) for point in core.fault_points()}


@pytest.fixture(scope="module")
def good(faulty_core: ModuleType) -> Callable[[str], tuple[Answers, dict[str, int]]]:
    """Return the outputs of a scene without faults, and how often it passes each point."""
    made: dict[str, tuple[Answers, dict[str, int]]] = {}
    for scene, limits in SCENES.items():
        before = hits(faulty_core)
        answers = run(faulty_core, limits)
        made[scene] = answers, {point: n - before[point] for point, n in hits(faulty_core).items()}
    return made.__getitem__


def test_the_table_the_source_and_the_runs_name_the_same_points(
    core: ModuleType, good: Callable[[str], tuple[Answers, dict[str, int]]]
) -> None:
    text = "".join(path.read_text("utf-8") for path in SOURCE.rglob("*.rs"))
    in_source = set(re.findall(r'(?:fault_point!\((?:panic )?|table::hit\()"([a-z_.]+)"', text))
    assert set(POINTS) | SESSIONS | RANKS | UNUSED_BY_ENGINE == set(core.fault_points()) == in_source
    assert {point for scene in SCENES for point, n in good(scene)[1].items() if n} == set(POINTS)


def test_the_runs_cover_every_event_and_agree(
    good: Callable[[str], tuple[Answers, dict[str, int]]],
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
    good: Callable[[str], tuple[Answers, dict[str, int]]],
    scene: str,
    point: str,
    action: str,
) -> None:
    want, passed = good(scene)
    n_passed = passed[point]
    for nth in sorted(
        {1 + i * (n_passed - 1) // (N_PASSES - 1) for i in range(N_PASSES)} if n_passed else ()
    ):
        before = core.fault_hits(point)
        core.set_fault(point, action, nth)
        if POINTS[point] == "lost":
            with pytest.raises(EngineDeadError, match=re.escape(point)):
                run(core, SCENES[scene])
        else:
            check_answers(run(core, SCENES[scene]), want)
        assert core.fault_hits(point) - before >= nth, "the fault did not happen"
