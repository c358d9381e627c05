"""A small Mistral with a window through the engine: reclaiming cells changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.asks import ask
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.kv_cache_planner import max_window_cells
from llaisys.engine.limits import Limits
from llaisys.engine.memory import WorkerSettings
from llaisys.engine.worker import Worker, open_worker
from parity.numpy_forward import Shape
from parity.random_model import random_weights, write_model

WINDOW, STEP, N_TOKENS = 33, 32, 250
# With two layers a token depends on up to 65 tokens before it, so one wrong cell shows.
SHAPE = Shape(
    n_layers=2,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    d_head=16,
    d_ff=96,
    vocab_size=300,
    rope_theta=1e4,
    rms_eps=1e-5,
    qkv_bias=False,
    qk_norm="none",
    tied=True,
    window=WINDOW,
    windowed=(True, True),
)
LENGTHS = {"one": 1, "step": STEP, "long": 180, "other": 90}
PROMPTS = {name: [(7 * n + 17 * j) % 300 for j in range(n)] for name, n in LENGTHS.items()}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    return write_model(folder, "mistral", SHAPE, random_weights(SHAPE, 7))


def answers(path: Path, names: list[str], n_cells: int, *, caching: bool) -> tuple[dict[Any, list[int]], int]:
    """Run requests together, with all checks after each step; return their tokens and the most cells used."""
    limits = Limits(
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=STEP,
        max_num_queued_reqs=10,
        max_model_len=256,
        n_cells=n_cells,
        vocab_size=SHAPE.vocab_size,
        enable_prefix_caching=caching,
    )
    settings = WorkerSettings(
        path=path,
        dtype="float32",
        kv_dtype="float32",
        isa="auto",
        n_cells=n_cells,
        n_seq_max=len(PROMPTS),
        n_batch=STEP,
        max_model_len=256,
        n_threads=1,
    )
    engine = LLMEngine(Executor(open_worker(settings)), limits, 0)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        n_left = N_TOKENS - len(PROMPTS[name])
        engine.submit(ask(name, PROMPTS[name], max_tokens=n_left, temperature=1.0, seed=3, ignore_eos=True))
    n_most = 0
    while engine.has_work():
        for output in engine.step(1000.0):
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
        engine.check()
        n_most = max(n_most, engine.stats().kv_cells_used)
    stats = engine.stats()
    assert (stats.kv_cells_used, stats.kv_cells_free + stats.kv_cells_retained) == (0, n_cells)
    engine.close()
    return tokens, n_most


@pytest.mark.parametrize("caching", [True, False])
def test_tokens_are_equal_with_and_without_reclaiming(
    mistral: Path, monkeypatch: pytest.MonkeyPatch, *, caching: bool
) -> None:
    names = [*PROMPTS]
    got, n_got = answers(mistral, names, 1024, caching=caching)
    tight, _ = answers(mistral, names, 256, caching=caching)
    alone = {name: answers(mistral, [name], 256, caching=caching) for name in names}
    monkeypatch.setattr(Worker, "attention_window", None)
    want, n_want = answers(mistral, names, 1024, caching=caching)
    print(f"{n_want} cells without reclaiming, {n_got} with")
    assert got == want == tight == {name: tokens[name] for name, (tokens, _) in alone.items()}
    assert len({tuple(tokens[-20:]) for tokens in got.values()}) == len(names), "equal outputs"
    most = max_window_cells(WINDOW, STEP) + WINDOW
    assert all(n <= most for _, n in alone.values())
    assert most < N_TOKENS
    assert n_got < n_want
