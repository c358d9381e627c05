"""The engine with recurrent states on the real KvCache: which states are kept, used and dropped."""

from __future__ import annotations

from itertools import islice
from typing import Any

from fakes.asks import ask, limits
from fakes.core import SamplerSpec
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.worker import Worker
from sim.context import SimContext, answer

FIRST = [7] * 20


class Engine:
    """An engine on a simulated context that keeps `n_states_kept` states."""

    def __init__(self, n_states_kept: int, **changes: Any) -> None:
        bounds = limits(
            state_bytes=1,
            n_states_kept=n_states_kept,
            **{"max_num_batched_tokens": 256, "max_model_len": 256, **changes},
        )
        self.context = SimContext(
            n_cells=bounds.n_cells, n_seq_max=bounds.max_num_seqs, n_states_kept=n_states_kept
        )
        self.engine = LLMEngine(Executor(Worker(self.context, SamplerSpec)), bounds, 0)  # type: ignore[arg-type]
        self.outputs: list[EngineOutput] = []

    def step(self, now_s: float = 1000.0) -> None:
        self.outputs += self.engine.step(now_s)
        self.engine.check()

    def finish(self, now_s: float = 1000.0) -> None:
        while self.engine.has_work():
            self.step(now_s)

    def run(self, name: str, prompt: list[int], n_tokens: int = 2) -> int:
        """Run a request to its end with the tokens that it gets alone; return its cached tokens."""
        self.engine.submit(ask(name, prompt, max_tokens=n_tokens, eos_token_ids=()))
        self.finish()
        return self.check(name, prompt, n_tokens)

    def check(self, name: str, prompt: list[int], n_tokens: int) -> int:
        mine = [output for output in self.outputs if output.request_id == name]
        want = [*islice(answer(prompt, SamplerSpec(temperature=0.0)), n_tokens)]
        assert [token for output in mine for token in output.new_token_ids] == want
        return sum(output.num_cached_tokens for output in mine)


def test_a_state_that_an_admission_needs_is_not_dropped_by_a_request_that_ends_in_the_same_step() -> None:
    made = Engine(2, max_num_seqs=1)
    made.run("first", FIRST)
    made.engine.submit(ask("expires", [9] * 30, max_tokens=50, deadline_s=1500.0, eos_token_ids=()))
    for _ in range(3):
        made.step()
    assert made.context.n_states_kept == 2
    # Its end keeps a third state, and that of the waiting request is the least recently used.
    turn = [*FIRST, *answer_of(FIRST, 2), 1, 2]
    made.engine.submit(ask("turn", turn, max_tokens=2, eos_token_ids=()))
    made.step(1501.0)
    made.finish(1501.0)
    assert made.check("turn", turn, 2) == len(FIRST) + 1


def test_the_least_recently_used_state_is_dropped_first() -> None:
    made = Engine(4)
    prompts = [[i] * 20 for i in (1, 2)]
    for i, prompt in enumerate(prompts):
        assert made.run(f"{i}", prompt) == 0
    turns = [[*prompt, *answer_of(prompt, 2)] for prompt in prompts]
    # Each request keeps two states: after its prompt and after its output.
    assert made.run("first again", [*turns[0], 5]) == 21
    assert made.run("third", [3] * 20) == 0
    assert made.run("first once more", [*turns[0], 5, 6]) == 23
    assert made.run("second again", [*turns[1], 5]) == 0, "newer states replaced its own"


def test_equal_prompts_in_one_step_are_stored_once() -> None:
    made = Engine(4)
    for name in "ab":
        made.engine.submit(ask(name, FIRST, max_tokens=5, eos_token_ids=()))
    made.step()
    assert made.engine.stats().kv_cells_used == 20, "computed twice, stored once"
    made.finish()
    assert [made.check(name, FIRST, 5) for name in "ab"] == [0, 0]


def test_choices_share_the_prompt_up_to_its_stop() -> None:
    made = Engine(4)
    prompt = [*range(100)]
    made.engine.submit(ask("n", prompt, n=3, max_tokens=3, eos_token_ids=()))
    made.finish()
    n_rows = made.context.n_rows
    assert n_rows == 100 + 2 * 16 + 3 * 2
    tokens: dict[int, list[int]] = {}
    for output in made.outputs:
        tokens.setdefault(output.index, []).extend(output.new_token_ids)
    assert tokens == dict.fromkeys(range(3), answer_of(prompt, 3))


def answer_of(prompt: list[int], n: int) -> list[int]:
    return [*islice(answer(prompt, SamplerSpec(temperature=0.0)), n)]
