"""A failing step ends the request that is to blame; the others get the tokens they would have had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import core
from fakes.asks import ask
from llaisys.engine.executor import Executor
from llaisys.engine.request import Request
from llaisys.engine.worker import Chunk, Worker
from llaisys.errors import EngineDeadError, RequestFailedError


def step(last_tokens: list[int]) -> tuple[core.Context, Executor, list[Chunk]]:
    """One sequence of three tokens for each last token."""
    n = len(last_tokens)
    context = core.Context("fake", n_cells=3 * n, n_seq_max=n, max_model_len=8)
    executor = Executor(Worker(context, core.SamplerSpec))  # type: ignore[arg-type]
    request = Request(ask(), ordinal=0, seed=0, token_limit=8)
    chunks = [
        Chunk(executor.open_sequence(request), 0, [1, i, t], samples=True) for i, t in enumerate(last_tokens)
    ]
    return context, executor, chunks


@given(st.integers(1, 40), st.data())
def test_the_culprits_fail_and_the_innocent_do_not_notice(n: int, data: st.DataObject) -> None:
    most = n if n < 4 else (n - 1) // 2
    culprits = data.draw(st.sets(st.integers(0, n - 1), max_size=most))
    context, executor, chunks = step([core.REFUSED if i in culprits else 5 for i in range(n)])
    results = executor.run(chunks)
    for i, result in enumerate(results):
        if i in culprits:
            assert isinstance(result.error, RequestFailedError)
        else:
            assert result.token_id == core.answer([1, i, 5], 1)[0]
    assert context.n_cells_free == 3 * len(culprits)
    executor.check()


def test_one_culprit_costs_a_bisection() -> None:
    context, executor, chunks = step([core.REFUSED] + [5] * 63)
    executor.run(chunks)
    assert context.n_decodes == 6  # the good half of each of six splits


def test_half_of_a_batch_refused_is_the_engines_fault() -> None:
    _, executor, chunks = step([core.REFUSED, 5, core.REFUSED, 5])
    with pytest.raises(EngineDeadError, match="2 of 4"):
        executor.run(chunks)


def test_rows_that_came_out_wrong_are_their_requests_affair() -> None:
    _, executor, chunks = step([core.NON_FINITE] * 4)
    assert all(isinstance(result.error, RequestFailedError) for result in executor.run(chunks))


@pytest.mark.parametrize(("trouble", "error"), [(core.DEADLY, EngineDeadError), (core.PANICS, core.Panic)])
def test_a_lost_core_is_not_bisected(trouble: int, error: type[BaseException]) -> None:
    context, executor, chunks = step([5, 5, trouble, 5])
    with pytest.raises(error):
        executor.run(chunks)
    assert context.n_decodes == 0
