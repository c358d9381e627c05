"""Segments and streams through the compiled door: on the golden model, and on books with no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import FOLDER
from llaisys import _core
from llaisys.errors import ExhaustedError, LlaisysError, RejectedError
from runner import LOGITS, Runner

TESTS = Path(__file__).parents[1]
PROMPT = [(7 * i + 3) % 500 for i in range(40)]


def greedy_after(runner: Runner, seq: int, tokens: list[int], n_held: int) -> list[int]:
    """Eight greedy ids after `tokens`, of which the sequence has the first `n_held`."""
    rows = [(t, n_held + i, [seq], 0) for i, t in enumerate(tokens[n_held:])]
    rows[-1] = (*rows[-1][:3], LOGITS)
    ids = [int(runner.decode(rows).token_ids[0])]
    for position in range(len(tokens), len(tokens) + 7):
        ids.append(int(runner.decode([(ids[-1], position, [seq], LOGITS)]).token_ids[0]))
    return ids


@pytest.mark.parametrize("n_streams", [1, 2, 4])
def test_the_same_tokens_with_any_number_of_streams(n_streams: int) -> None:
    with Runner(FOLDER) as runner:
        want = runner.greedy(PROMPT, 8)
    with Runner(FOLDER, n_streams=n_streams, poison=True, lifo=True) as runner:
        context = runner.context
        first = context.seq_acquire(n_streams - 1)
        assert greedy_after(runner, first, PROMPT, 0) == want
        context.kv_retain(1, first, 0, 30)
        context.kv_segment_split(1, 10, 2)
        context.seq_release(first)
        for stream in range(n_streams):
            seq = context.seq_acquire(stream)
            free = context.n_cells_free_in(stream)
            context.kv_attach(1, seq, 0, 10)
            context.kv_attach(2, seq, 10, 25)
            copied = 0 if stream == n_streams - 1 else 25
            assert free - context.n_cells_free_in(stream) == copied
            assert greedy_after(runner, seq, PROMPT, 25) == want
            context.check_integrity()
            context.seq_release(seq)
        context.kv_segment_trim(2, 10)
        context.kv_segment_trim(1, 0)
        assert context.n_cells_free == context.n_cells


def ends(positions: list[int], seq: int) -> tuple[Any, Any, Any]:
    return (
        np.array(positions, np.int32),
        np.ones(len(positions), np.int32),
        np.full(len(positions), seq, np.int64),
    )


def test_saved_cells_serve_another_context_and_another_process() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from golden import FOLDER
from runner import Runner
print(Runner(FOLDER).context.fingerprint())
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with Runner(FOLDER) as runner, Runner(FOLDER, n_streams=2) as restored:
        want = runner.greedy(PROMPT, 8)
        assert runner.context.fingerprint() == restored.context.fingerprint() == other.stdout.strip()
        seq = runner.context.seq_acquire()
        runner.extend(seq, PROMPT, 0)
        runner.context.kv_retain(1, seq, 0, 39)
        data = runner.context.kv_export(1, 0, 39)
        assert data.dtype == np.uint8
        restored.context.kv_import(1, 1, 0, data)
        seq = restored.context.seq_acquire(1)
        restored.context.kv_attach(1, seq, 0, 39)
        assert greedy_after(restored, seq, PROMPT, 39) == want
        with pytest.raises(RejectedError, match=f"the data has {len(data) - 1} bytes"):
            restored.context.kv_import(2, 0, 0, data[1:])
        with pytest.raises(RejectedError, match="data is not in C order"):
            restored.context.kv_import(2, 0, 0, data[::2])


def test_books_answer_as_a_context_does() -> None:
    """The same calls to both: the same answers, the same kinds of error, the same cells."""
    shape = {"n_cells": 96, "n_seq_max": 3, "n_streams": 2}
    books = _core.Books(**shape)
    with Runner(FOLDER, **shape) as runner:
        context = runner.context

        def ask(name: str, *arguments: int) -> Any:
            answers = []
            for target in (books, context):
                try:
                    answers.append(getattr(target, name)(*arguments))
                except LlaisysError as error:
                    answers.append((type(error), str(error)))
            assert answers[0] == answers[1], name
            assert books.digest() == context.digest()
            return answers[0]

        def extend(seq: int, positions: list[int]) -> None:
            books.extend(*ends(positions, seq))
            runner.decode([(1, p, [seq], 0) for p in positions])

        a, b = ask("seq_acquire"), ask("seq_acquire", 1)
        assert ask("seq_acquire", 2)[0] is RejectedError
        extend(a, list(range(20)))
        ask("kv_retain", 5, a, 0, 16)
        assert ask("kv_retain", 6, a, 15, 17)[0] is RejectedError
        ask("kv_attach", 5, b, 0, 12)
        ask("kv_seq_cp", a, b, 12, 20)
        ask("kv_seq_add", a, 16, -1, 2)
        assert ask("kv_seq_pos_max", a) == 21
        ask("kv_segment_split", 5, 4, 6)
        ask("kv_segment_trim", 5, 2)
        ask("kv_seq_rm", b, 3, 5)
        assert ask("n_cells_free_in", 1) == 48 - 18
        ask("kv_seq_keep", a)
        c = ask("seq_acquire", 1)
        for n in (48, 49):
            rows = [(1, p, [c], 0) for p in range(n)]
            if n == 49:
                with pytest.raises(ExhaustedError, match="49 KV cells are needed, 48 of 48"):
                    books.extend(*ends(list(range(n)), c))
                with pytest.raises(ExhaustedError, match="49 KV cells are needed, 48 of 48"):
                    runner.decode(rows)
        ask("seq_release", a)
        assert ask("seq_release", a)[0] is RejectedError
        ask("check_integrity")
        assert (books.n_cells_free, books.n_seq_free) == (context.n_cells_free, context.n_seq_free)


def test_a_snapshot_says_who_holds_what() -> None:
    books = _core.Books(n_cells=64, n_seq_max=2, n_streams=2)
    seq = books.seq_acquire(1)
    books.extend(*ends(list(range(5)), seq))
    books.kv_retain(2**64 - 1, seq, 2, 5)
    snapshot = books.snapshot()
    assert snapshot.sequences == [(seq, 1, [(0, 32, 5)])]
    assert snapshot.segments == [(2**64 - 1, 1, 2, [(2, 34, 3)])]
    assert snapshot.n_free == [32, 27]


def test_lifo_books_lend_what_was_returned_last() -> None:
    books = _core.Books(n_cells=8, n_seq_max=4, lifo=True)
    a, b = books.seq_acquire(), books.seq_acquire()
    books.seq_release(a)
    books.seq_release(b)
    assert books.seq_acquire() == 1 << 16 | 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n_cells": 10, "n_streams": 3}, "does not divide"),
        ({"n_streams": 0}, "n_streams is 0"),
        ({"n_seq_max": 257}, "n_seq_max is 257"),
    ],
)
def test_books_of_a_wrong_size_are_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(RejectedError, match=says):
        _core.Books(**{"n_cells": 12, "n_seq_max": 2, **settings})
    with pytest.raises(RejectedError, match=says):
        Runner(FOLDER, **{"n_cells": 12, **settings})


def test_arrays_of_books_are_checked() -> None:
    books = _core.Books(n_cells=8, n_seq_max=1)
    seq = books.seq_acquire()
    positions, n_seq_id, seq_ids = ends([0, 1], seq)
    with pytest.raises(RejectedError, match="positions is not in C order"):
        books.extend(np.arange(4, dtype=np.int32)[::2], n_seq_id, seq_ids)
    with pytest.raises(RejectedError, match="stream is -1"):
        books.seq_acquire(-1)
    assert books.n_cells_free == 8
    books.extend(positions, n_seq_id, seq_ids)
    assert books.n_cells_free == 6
