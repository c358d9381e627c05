"""Everything that three requests can do to an engine with two sequence ids and four cells.

To depth 7, and in `make test-long` to depth 12. The search does every possible action in each state and
visits equal states once. After every action all counts are verified. From every state the engine ends every
request without further actions, and keeps only the prefix cache.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from fakes.asks import ask, limits
from fakes.core import SamplerSpec
from llaisys.engine import kv_cache_planner
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import Worker
from llaisys.outputs import FinishReason
from sim.context import SimContext, answer

N_IDS, N_CELLS = 2, 4
STEPS_TO_END_MAX = 24
# The first two share a prefix, and their worst cases do not fit together; the third has a higher priority.
REQUESTS = (
    ask("a", [1, 2], max_tokens=2, deadline_s=2000.0),
    ask("b", [1, 2, 3], max_tokens=1, deadline_s=1001.0),
    ask("c", [4], max_tokens=3, priority=-1, client_id="c", deadline_s=2000.0),
)

Action = tuple[str, int]


class Small:
    """The engine, with the tokens and the end of each submitted request."""

    def __init__(self) -> None:
        self.context = SimContext(n_cells=N_CELLS, n_seq_max=N_IDS, lifo=True)
        bounds = limits(max_num_seqs=N_IDS, max_num_batched_tokens=3, max_model_len=N_CELLS, n_cells=N_CELLS)
        worker = Worker(self.context, SamplerSpec)  # type: ignore[arg-type]
        self.engine = LLMEngine(Executor(worker), bounds, 0)
        self.now_s = 1000.0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.cancelled: set[str] = set()

    def actions(self) -> list[Action]:
        """Return the possible actions."""
        engine = self.engine
        names = [request.request_id for request in REQUESTS]
        possible = [("submit", i) for i, name in enumerate(names) if name not in self.tokens]
        possible += [
            ("cancel", i) for i, name in enumerate(names) if name in self.tokens and name not in self.ends
        ]
        possible += [("fault", 0)] if not self.context.faults and engine.has_work() else []
        possible += [("pass", 0)] if self.now_s == 1000.0 else []
        return possible + ([("step", 0)] if engine.has_work() else [])

    def do(self, action: Action) -> None:
        """Do one action and all checks."""
        what, i = action
        request = REQUESTS[i]
        if what == "submit":
            self.engine.submit(request)
            self.tokens[request.request_id] = []
        elif what == "cancel":
            self.engine.cancel(request.request_id)
            self.cancelled.add(request.request_id)
        elif what == "fault":
            self.context.faults = 1
        elif what == "pass":
            self.now_s += 1
        else:
            self.step()
        self.engine.check()

    def step(self) -> None:
        """Run one step; check that each output is that of the request alone, and the reason of each end."""
        for output in self.engine.step(self.now_s):
            name = output.request_id
            assert name not in self.ends
            self.tokens[name] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[name] = output.finish_reason
                assert output.last
                self.check_end(next(r for r in REQUESTS if r.request_id == name), output.finish_reason)

    def check_end(self, request: EngineRequest, reason: FinishReason) -> None:
        name, tokens = request.request_id, self.tokens[request.request_id]
        spec = SamplerSpec(temperature=0.0)
        assert tokens == [*islice(answer(request.prompt_token_ids, spec), len(tokens))]
        match reason:
            case FinishReason.LENGTH:
                assert len(tokens) == request.params.max_tokens
            case FinishReason.ABORT:
                assert name in self.cancelled
            case FinishReason.TIMEOUT:
                assert request.deadline_s <= self.now_s
            case _:
                raise AssertionError(f"{name} ended by {reason}")

    def state(self) -> Any:
        """Return all that determines the future, without the numbers of cells, ids, nodes and steps."""
        engine: Any = self.engine
        steps = sorted({r.last_step for r in engine._open.values()})
        index = engine._kv_cache.prefix_cache
        return (
            tuple(
                (r.ordinal, r.request_id, type(r.state), tuple(r.token_ids), r.num_computed, r.num_shared,
                 r.num_cached, r.num_preempted, steps.index(r.last_step))
                for r in engine._open.values()
            ),
            tuple((start, tuple(tokens), pins) for _, _, _, start, tokens, pins in index.dump()),
            tuple((node.start, node.tokens.tobytes()) for node in index._unpinned[0]),
            repr(engine._round_robin), repr(engine._pending),
            engine._last_deadline_scan_s, engine._last_cleanup_s,
            tuple(sorted(self.tokens)), tuple(sorted(self.ends)), self.now_s, self.context.faults,
        )  # fmt: skip

    def end(self) -> None:
        """Check that every request ends without further actions, and only the cache keeps cells."""
        for _ in range(STEPS_TO_END_MAX):
            if not self.engine.has_work():
                break
            self.step()
        assert self.tokens.keys() == self.ends.keys(), "a request did not end"
        self.engine.check()
        stats = self.engine.stats()
        assert stats.kv_cells_used == 0
        assert stats.kv_cells_free + stats.kv_cells_retained == N_CELLS
        assert self.context.n_seq_free == N_IDS


def replay(path: tuple[Action, ...]) -> Small:
    world = Small()
    for action in path:
        world.do(action)
    return world


@pytest.mark.parametrize(
    ("headroom", "depth_max"),
    [(0, 7), pytest.param(0, 12, marks=pytest.mark.long), pytest.param(8, 12, marks=pytest.mark.long)],
)
def test_all_that_three_requests_can_do(
    headroom: int, depth_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lookahead the scheduler admits requests that cannot all continue, so some are preempted."""
    monkeypatch.setattr(kv_cache_planner, "LOOKAHEAD_TOKENS", headroom)
    seen = set()
    n_preempted = n_evicted = n_hits = 0
    frontier: list[tuple[Action, ...]] = [()]
    for depth in range(depth_max + 1):
        reached: list[tuple[Action, ...]] = []
        for path in frontier:
            try:
                world = replay(path)
                actions = world.actions()
                state = world.state()
                if state in seen:
                    continue
                seen.add(state)
                reached += [(*path, action) for action in actions]
                world.end()
                stats = world.engine.stats()
                n_preempted += stats.num_preempted > 0
                n_evicted += stats.num_evicted_cells > 0
                n_hits += stats.prefix_hit_tokens > 0
            except BaseException:
                print("the shortest path to it:", path)
                raise
        print(f"depth {depth}: {len(frontier)} paths, {len(seen)} states")
        frontier = reached
    print(f"{n_preempted} states with a preemption, {n_evicted} with an eviction, {n_hits} with a prefix hit")
    assert min(n_evicted, n_hits) > 100
    assert (n_preempted > 100) == (headroom == 0)
