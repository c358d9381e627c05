"""The fake core and the compiled one give the same answers to the same calls: ids, cells, positions, errors.

What the tests of the engine prove on the fake then holds for the engine on the core.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import core as fake
from golden import FOLDER
from llaisys import _core
from llaisys.errors import LlaisysError

N_CELLS, N_SEQS, MAX_LEN = 24, 3, 16
Call = tuple[str, int, int]


class Both:
    """The same call to both; the same answer, or the same kind of error, or the test fails."""

    def __init__(self, real: _core.Context) -> None:
        self.real = real
        self.fake = fake.Context("fake", n_cells=N_CELLS, n_seq_max=N_SEQS, max_model_len=MAX_LEN)
        self.ids: list[tuple[int, int]] = []

    def ask(self, name: str, *pairs: tuple[Any, Any]) -> Any:
        answers = []
        for context, i in ((self.real, 0), (self.fake, 1)):
            try:
                answers.append(getattr(context, name)(*(pair[i] for pair in pairs)))
            except LlaisysError as error:
                answers.append(type(error))
        return answers

    def acquire(self) -> None:
        real, made_up = self.ask("seq_acquire")
        assert isinstance(real, type) == isinstance(made_up, type)
        if isinstance(real, type):
            assert real is made_up
        else:
            self.ids.append((real, made_up))

    def release(self, which: int) -> None:
        """A lent id, or one that was returned before."""
        if self.ids:
            real, made_up = self.ask("seq_release", self.ids[which % len(self.ids)])
            assert real == made_up

    def decode(self, which: int, shape: int) -> None:
        """A few tokens of one sequence, sometimes at a wrong place, sometimes too many."""
        if not self.ids:
            return
        pair = self.ids[which % len(self.ids)]
        _, end = self.ask("kv_seq_pos_max", pair)
        start = 0 if isinstance(end, type) else end + 1
        n, start = 1 + shape % 9, start + (shape == 7)
        tokens = np.arange(1, n + 1, dtype=np.int32)
        wants = np.zeros(n, np.uint8)
        wants[-1] = 1
        shared = [tokens, np.arange(start, start + n, dtype=np.int32), np.ones(n, np.int32)]
        pairs = [(a, a) for a in shared] + [tuple(np.full(n, i, np.int64) for i in pair), (wants, wants)]
        real, made_up = self.ask("decode", *pairs)
        if isinstance(real, type) or isinstance(made_up, type):
            assert real is made_up, (n, start)
        else:
            assert real.rows.tolist() == made_up.rows.tolist()
            assert len(real.token_ids) == len(made_up.token_ids) == 1
            assert real.faults == made_up.faults == []

    def trim(self, which: int, at: int) -> None:
        """Forgets the end of a sequence."""
        if self.ids:
            at %= MAX_LEN
            real, made_up = self.ask("kv_seq_rm", self.ids[which % len(self.ids)], (at, at), (-1, -1))
            assert real == made_up

    def compare(self) -> None:
        """Both KV caches are equal."""
        self.real.check_integrity()
        self.fake.check_integrity()
        assert (self.real.n_cells_free, self.real.n_seq_free) == (
            self.fake.n_cells_free,
            self.fake.n_seq_free,
        )
        for pair in self.ids:
            for name in ("kv_seq_pos_min", "kv_seq_pos_max"):
                real, made_up = self.ask(name, pair)
                assert real == made_up


calls = st.tuples(
    st.sampled_from(["acquire", "acquire", "release", "decode", "decode", "decode", "trim"]),
    st.integers(0, 7),
    st.integers(0, 20),
)


@pytest.fixture(scope="module")
def real() -> Any:
    """Made once; each example leaves it empty."""
    context = _core.Context(
        str(FOLDER),
        dtype="float32",
        n_cells=N_CELLS,
        n_seq_max=N_SEQS,
        n_batch=32,
        max_model_len=MAX_LEN,
        n_threads=1,
    )
    yield context
    context.close()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(calls, max_size=40))
def test_the_same_answers_to_the_same_calls(real: _core.Context, sequence: list[Call]) -> None:
    both = Both(real)
    try:
        for name, which, shape in sequence:
            match name:
                case "acquire":
                    both.acquire()
                case "release":
                    both.release(which)
                case "decode":
                    both.decode(which, shape)
                case _:
                    both.trim(which, shape)
            both.compare()
    finally:
        for real_id, _ in both.ids:
            with contextlib.suppress(LlaisysError):  # returned already
                real.seq_release(real_id)


def test_rows_of_a_prompt_score_it_alike(real: _core.Context) -> None:
    """Ids, and which rows have logprobs; the numbers are each model's own."""
    prompt = np.array([5, 6, 7, 8], np.int32)
    made_up = fake.Context("fake", n_cells=N_CELLS, n_seq_max=N_SEQS, max_model_len=MAX_LEN)
    answers = []
    for context, make in ((real, _core.SamplerSpec), (made_up, fake.SamplerSpec)):
        seq = context.seq_acquire()
        spec: Any = make(temperature=0.0, prompt_logprobs=0)
        context.set_sampler(seq, spec, prompt, prompt[:0])
        output = context.decode(
            prompt,
            np.arange(4, dtype=np.int32),
            np.ones(4, np.int32),
            np.full(4, seq, np.int64),
            np.ones(4, np.uint8),
        )
        context.seq_release(seq)
        assert all(logprob < 0.0 <= rank and top == [] for _, logprob, rank, top in output.logprobs)
        answers.append((output.token_ids.tolist()[:3], [row for row, *_ in output.logprobs]))
    assert answers == [([6, 7, 8], [0, 1, 2])] * 2


def test_the_fake_has_the_calls_that_the_engine_makes() -> None:
    for name in dir(fake.Context):
        if not name.startswith("_"):
            assert hasattr(_core.Context, name), f"{name} is not a call of the core"
