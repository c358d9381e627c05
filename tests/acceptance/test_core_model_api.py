"""Model API: create, decode, sequence operations, replace_weight, close. Rejected calls have no side
effects."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from golden import FOLDER, Golden
from llaisys._core import available_isas
from llaisys.errors import ExhaustedError, RejectedError, UnsupportedError
from runner import LOGITS, Runner

pytestmark = pytest.mark.stage0


def test_create_returns_the_model_info(golden: Golden) -> None:
    with Runner(FOLDER, n_cells=96, n_seq_max=3) as runner:
        context = runner.context
        assert (context.n_cells, context.n_cells_free, context.n_seq_free) == (96, 96, 3)
        assert context.vocab_size == golden.vocab_size
        assert context.weight_bytes > 0
        assert context.isa == available_isas()[0]


def test_create_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RejectedError):
        Runner(tmp_path / "nowhere")
    with pytest.raises(UnsupportedError, match="sse9"):
        Runner(FOLDER, isa="sse9")


def test_a_sequence_id_is_acquired_once_and_released_once() -> None:
    with Runner(FOLDER, n_seq_max=2) as runner:
        context = runner.context
        first, second = context.seq_acquire(), context.seq_acquire()
        assert first != second
        with pytest.raises(ExhaustedError):
            context.seq_acquire()
        context.seq_release(first)
        with pytest.raises(RejectedError):
            context.seq_release(first)
        again = context.seq_acquire()
        assert again not in (first, second)  # the slot is the same, the generation is not
        with pytest.raises(RejectedError):
            runner.decode([(1, 0, [first], LOGITS)])


def test_release_returns_the_cells() -> None:
    with Runner(FOLDER, n_cells=64) as runner:
        seq = runner.context.seq_acquire()
        runner.extend(seq, range(40), 0)
        assert runner.context.n_cells_free == 24
        runner.context.seq_release(seq)
        assert runner.context.n_cells_free == 64
        runner.context.check_integrity()


def test_replace_weight_changes_the_output_and_back() -> None:
    with Runner(FOLDER) as runner:
        prompt = [5, 6, 7]
        before, _ = runner.forward(prompt)
        runner.context.replace_weight("model.norm.weight", np.zeros(64, np.float32))
        assert not runner.forward(prompt)[0].any()
        with pytest.raises(RejectedError, match=r"no\.such"):
            runner.context.replace_weight("no.such", np.zeros(64, np.float32))
        with pytest.raises(RejectedError):
            runner.context.replace_weight("model.norm.weight", np.ones(63, np.float32))
        assert not runner.forward(prompt)[0].any()
    assert before.any()


def test_replace_weight_of_one_projection_is_exact(tmp_path: Path) -> None:
    """A replaced weight gives the bits of a model that was saved with it."""
    import shutil

    from safetensors.numpy import load_file, save_file

    shutil.copytree(FOLDER.parent / "qwen2-odd-f32-sharded", tmp_path / "m")
    name = "model.layers.1.self_attn.k_proj.weight"
    index = [p for p in (tmp_path / "m").glob("*.safetensors") if name in load_file(p)]
    tensors = load_file(index[0])
    swapped = np.roll(tensors[name], 1, axis=0).copy()
    save_file({**tensors, name: swapped}, index[0])
    with Runner(tmp_path / "m") as runner:
        want, _ = runner.forward([1, 2, 3, 4])
    with Runner(FOLDER.parent / "qwen2-odd-f32-sharded") as runner:
        runner.context.replace_weight(name, swapped)
        got, _ = runner.forward([1, 2, 3, 4])
    np.testing.assert_array_equal(got, want)


def test_close_is_idempotent_and_final() -> None:
    runner = Runner(FOLDER)
    seq = runner.context.seq_acquire()
    runner.context.close()
    runner.context.close()
    for call in (
        lambda: runner.context.seq_acquire(),
        lambda: runner.decode([(1, 0, [seq], LOGITS)]),
        lambda: runner.context.kv_seq_rm(seq, -1, -1),
    ):
        with pytest.raises(RejectedError, match="closed"):
            call()


def test_another_thread_is_refused() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with (
        Runner(FOLDER) as runner,
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RejectedError, match="thread"),
    ):
        pool.submit(runner.context.seq_acquire).result()
