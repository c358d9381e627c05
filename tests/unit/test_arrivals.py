"""Outputs reach their readers in bounded turns of the event loop, with the time when their step arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llaisys.arrivals import BYTES_A_TURN, OUTPUTS_A_TURN, Arrivals
from llaisys.engine.outputs import EngineOutput


class Sink:
    """Collects what is handed over. `seen`: how many there were in each turn of the loop, as a reader sees
    it."""

    def __init__(self, n_bytes: int = 1) -> None:
        self.now_s = 0.0
        self.outputs: list[tuple[str, float]] = []
        self.seen: list[int] = []
        self.n_bytes = n_bytes
        self.then: Callable[[], None] = lambda: None
        self.arrivals = Arrivals(asyncio.get_running_loop(), self.take, lambda: self.now_s)

    def take(self, output: EngineOutput, arrived_s: float) -> int:
        self.outputs.append((output.request_id, arrived_s))
        self.then()
        return self.n_bytes

    def step(self, *names: str) -> None:
        self.arrivals.deliver([EngineOutput(name, [1]) for name in names])

    async def all(self, n: int) -> list[int]:
        """Returns when `n` have been handed over: how many in each turn."""
        while len(self.outputs) < n:
            await asyncio.sleep(0)
            self.seen.append(len(self.outputs))
        return [
            after - before
            for before, after in zip([0, *self.seen], self.seen, strict=False)
            if after > before
        ]


async def test_one_wake_for_the_steps_of_a_turn_and_each_has_its_own_time() -> None:
    sink = Sink()
    for now_s, names in ((1.0, "ab"), (1.5, "a"), (4.0, "ba")):
        sink.now_s = now_s
        sink.step(*names)
    sink.now_s = 9.0
    assert await sink.all(5) == [5]
    assert sink.outputs == [("a", 1.0), ("b", 1.0), ("a", 1.5), ("b", 4.0), ("a", 4.0)]


@pytest.mark.parametrize(
    ("steps", "n_bytes", "a_turn"),
    [
        ([1000], 1, OUTPUTS_A_TURN),
        ([1] * 1000, 1, OUTPUTS_A_TURN),
        ([OUTPUTS_A_TURN] * 3, 1, OUTPUTS_A_TURN),
        ([70] * 10, BYTES_A_TURN // 8, 8),
        ([5], 100 * BYTES_A_TURN, 1),
    ],
)
async def test_a_turn_is_bounded_in_outputs_and_in_bytes(steps: list[int], n_bytes: int, a_turn: int) -> None:
    sink = Sink(n_bytes)
    names = [[f"{i}-{j}" for j in range(n)] for i, n in enumerate(steps)]
    for each in names:
        sink.step(*each)
    n_all = sum(steps)
    turns = await sink.all(n_all)
    assert turns == [a_turn] * (n_all // a_turn) + [n_all % a_turn] * (n_all % a_turn > 0)
    assert [name for name, _ in sink.outputs] == [name for each in names for name in each]


async def test_readers_run_while_steps_arrive_faster_than_they_are_handed_over() -> None:
    """Each output that is handed over takes as long as two more steps, until there were 5,000."""
    sink, n_steps = Sink(), 1

    def more() -> None:
        nonlocal n_steps
        for _ in range(2):
            if n_steps < 5000:
                n_steps += 1
                sink.step("a")

    sink.then = more
    sink.step("a")
    turns = await sink.all(5000)
    assert max(turns) == OUTPUTS_A_TURN
    assert len(turns) == -(-5000 // OUTPUTS_A_TURN)
    sink.then = lambda: None
    sink.step("late")  # it is woken again
    assert len(await sink.all(5001)) > len(turns)


async def test_an_error_while_handing_over_costs_that_output_alone() -> None:
    sink, errors = Sink(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fails() -> None:
        if len(sink.outputs) == 2:
            raise ValueError("on purpose")

    sink.then = fails
    sink.step("a", "b", "c")
    await sink.all(2)
    sink.step("d")
    await sink.all(4)
    assert [name for name, _ in sink.outputs] == ["a", "b", "c", "d"]
    assert [str(error) for error in errors] == ["on purpose"]
