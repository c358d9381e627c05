"""The fake core and the compiled core give equal results for equal calls: ids, cells, positions and errors.

Engine behavior verified on the fake core therefore also holds on the compiled one.
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
    """Both cores. Each call goes to both, which must return equal results or raise errors of one class."""

    def __init__(self, real: _core.Context) -> None:
        self.real = real
        self.fake = fake.Context("fake", n_cells=N_CELLS, n_seq_max=N_SEQS, max_model_len=MAX_LEN)
        self.ids: list[tuple[int, int]] = []

    def call(self, name: str, *pairs: tuple[Any, Any]) -> Any:
        answers = []
        for context, i in ((self.real, 0), (self.fake, 1)):
            try:
                answers.append(getattr(context, name)(*(pair[i] for pair in pairs)))
            except LlaisysError as error:
                answers.append(type(error))
        return answers

    def acquire(self) -> None:
        real, fake_result = self.call("seq_acquire")
        assert isinstance(real, type) == isinstance(fake_result, type)
        if isinstance(real, type):
            assert real is fake_result
        else:
            self.ids.append((real, fake_result))

    def release(self, which: int) -> None:
        """Release an acquired id, or one that was released before."""
        if self.ids:
            real, fake_result = self.call("seq_release", self.ids[which % len(self.ids)])
            assert real == fake_result

    def decode(self, which: int, shape: int) -> None:
        """Decode a few tokens of one sequence, sometimes at a wrong position, sometimes too many."""
        if not self.ids:
            return
        pair = self.ids[which % len(self.ids)]
        _, end = self.call("kv_seq_pos_max", pair)
        start = 0 if isinstance(end, type) else end + 1
        n, start = 1 + shape % 9, start + (shape == 7)
        tokens = np.arange(1, n + 1, dtype=np.int32)
        wants = np.zeros(n, np.uint8)
        wants[-1] = 1
        shared = [tokens, np.arange(start, start + n, dtype=np.int32), np.ones(n, np.int32)]
        pairs = [(a, a) for a in shared] + [tuple(np.full(n, i, np.int64) for i in pair), (wants, wants)]
        real, fake_result = self.call("decode", *pairs)
        if isinstance(real, type) or isinstance(fake_result, type):
            assert real is fake_result, (n, start)
        else:
            assert real.rows.tolist() == fake_result.rows.tolist()
            assert len(real.token_ids) == len(fake_result.token_ids) == 1
            assert real.faults == fake_result.faults == []

    def trim(self, which: int, at: int) -> None:
        """Remove the end of a sequence."""
        if self.ids:
            at %= MAX_LEN
            real, fake_result = self.call("kv_seq_rm", self.ids[which % len(self.ids)], (at, at), (-1, -1))
            assert real == fake_result

    def compare(self) -> None:
        """Check that both KV caches are equal."""
        self.real.check_integrity()
        self.fake.check_integrity()
        assert (self.real.n_cells_free, self.real.n_seq_free) == (
            self.fake.n_cells_free,
            self.fake.n_seq_free,
        )
        for pair in self.ids:
            for name in ("kv_seq_pos_min", "kv_seq_pos_max"):
                real, fake_result = self.call(name, pair)
                assert real == fake_result


calls = st.tuples(
    st.sampled_from(["acquire", "acquire", "release", "decode", "decode", "decode", "trim"]),
    st.integers(0, 7),
    st.integers(0, 20),
)


@pytest.fixture(scope="module")
def real() -> Any:
    """Return a compiled context, created once; each example leaves it empty."""
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
def test_equal_calls_have_equal_results(real: _core.Context, sequence: list[Call]) -> None:
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
            with contextlib.suppress(LlaisysError):  # already released
                real.seq_release(real_id)


def test_prompt_logprobs_have_equal_rows(real: _core.Context) -> None:
    """Compares ids and the rows that have logprobs; the values depend on the model."""
    prompt = np.array([5, 6, 7, 8], np.int32)
    fake_context = fake.Context("fake", n_cells=N_CELLS, n_seq_max=N_SEQS, max_model_len=MAX_LEN)
    answers = []
    for context, make in ((real, _core.SamplerSpec), (fake_context, fake.SamplerSpec)):
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


def test_every_call_of_the_fake_exists_in_the_core() -> None:
    for name in dir(fake.Context):
        if not name.startswith("_"):
            assert hasattr(_core.Context, name), f"{name} is not a call of the core"
