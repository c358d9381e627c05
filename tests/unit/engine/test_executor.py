"""A failing step ends only the request at fault; the others get the tokens of a lone run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import core
from fakes.asks import ask
from llaisys.engine.batch import Batch, Chunk
from llaisys.engine.executor import Executor
from llaisys.engine.request import Request, Running
from llaisys.engine.worker import Worker
from llaisys.errors import EngineDeadError, RejectedError, RequestFailedError

NOW = 1000.0


def step(last_tokens: list[int], name: str = "r{}") -> tuple[core.Context, Executor, Batch]:
    """Return a context, an executor and a batch with one three-token prompt per last token."""
    n = len(last_tokens)
    context = core.Context("fake", n_cells=3 * n, n_seq_max=n, max_model_len=8)
    worker = Worker(context, core.SamplerSpec)  # type: ignore[arg-type]
    chunks = []
    for i, token in enumerate(last_tokens):
        request = Request(ask(name.format(i)), ordinal=i, seed=0, token_limit=8)
        request.state = Running(worker.open_sequence(request))
        chunks.append(Chunk(request, 0, [1, i, token], samples=True))
    return context, Executor(worker), Batch([], chunks)


@given(st.integers(1, 40), st.data())
def test_only_faulty_requests_fail(n: int, data: st.DataObject) -> None:
    most = min(4, n if n < 4 else (n - 1) // 2)
    faulty = data.draw(st.sets(st.integers(0, n - 1), max_size=most))
    context, executor, batch = step([core.REFUSED if i in faulty else 5 for i in range(n)])
    result = executor.execute_model(batch, NOW)
    assert result.errors.keys() == faulty == set(result.rejected)
    assert all(isinstance(error, RequestFailedError) for error in result.errors.values())
    want = [-1 if i in faulty else core.answer([1, i, 5], 1)[0] for i in range(n)]
    assert result.token_ids == want
    assert context.n_cells_free == 3 * len(faulty)
    executor.check()


def test_one_faulty_request_costs_one_bisection() -> None:
    context, executor, batch = step([core.REFUSED] + [5] * 63)
    executor.execute_model(batch, NOW)
    assert context.n_decodes == 6  # the good half of each of six bisection steps


def test_beyond_the_bisection_limit_each_request_runs_alone() -> None:
    context, executor, batch = step([core.REFUSED if i in (0, 21, 42, 63) else 5 for i in range(64)])
    sizes = []
    run = executor.worker.execute_model
    executor.worker.execute_model = lambda part: sizes.append(len(part)) or run(part)  # type: ignore[method-assign,func-returns-value]
    result = executor.execute_model(batch, NOW)
    assert result.rejected == [0, 21, 42, 63]
    together = sum(n > 1 for n in sizes)
    assert together <= 1 + 2 * 6
    assert len(sizes) <= 1 + 2 * 6 + 64
    assert context.n_decodes <= 64


def test_a_batch_that_fails_only_as_a_whole_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    context, executor, batch = step([5] * 8)
    decode = context.decode

    def whole_fails(tokens: Any, *rest: Any) -> Any:
        if len(tokens) == 24:
            raise RejectedError("24 rows")
        return decode(tokens, *rest)

    context.decode = whole_fails  # type: ignore[method-assign]
    result = executor.execute_model(batch, NOW)
    assert (len(result.token_ids), result.errors) == (8, {})
    assert "8 items failed as a whole but not in parts: 24 rows" in caplog.text


def test_a_core_that_rejects_half_of_a_batch_ends_the_engine() -> None:
    _, executor, batch = step([core.REFUSED, 5, core.REFUSED, 5])
    with pytest.raises(EngineDeadError, match="2 of 4"):
        executor.execute_model(batch, NOW)


@pytest.mark.parametrize("seconds", [14.9, 15.1])
def test_five_rejected_requests_within_a_minute_end_the_engine(seconds: float) -> None:
    _, executor, batch = step([core.REFUSED] * 5)
    for i in range(4):
        executor.execute_model(batch.part(i, i + 1), NOW + i * seconds)
    last = batch.part(4, 5)
    if 4 * seconds > 60:
        assert executor.execute_model(last, NOW + 4 * seconds).rejected == [0]
    else:
        with pytest.raises(EngineDeadError, match="5 requests"):
            executor.execute_model(last, NOW + 4 * seconds)


def test_rejected_choices_of_one_request_count_once() -> None:
    _, executor, batch = step([core.REFUSED] * 8, name="one")
    for i in range(8):
        assert executor.execute_model(batch.part(i, i + 1), NOW).rejected == [0]


def test_non_finite_rows_fail_only_their_requests() -> None:
    _, executor, batch = step([core.NON_FINITE] * 4)
    result = executor.execute_model(batch, NOW)
    assert len(result.errors) == 4
    assert result.rejected == []


@pytest.mark.parametrize(("trouble", "error"), [(core.DEADLY, EngineDeadError), (core.PANICS, core.Panic)])
def test_a_dead_core_is_not_bisected(trouble: int, error: type[BaseException]) -> None:
    context, executor, batch = step([5, 5, trouble, 5])
    with pytest.raises(error):
        executor.execute_model(batch, NOW)
    assert context.n_decodes == 0
