"""Prefixes from disk on the compiled core: completions have the bits of those that compute everything."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.asks import ask
from golden import FOLDER
from invariance import bits
from llaisys import _core
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits
from llaisys.engine.worker import Worker, inspect_model

BLOCK, MAX_LEN = 16, 128
PROMPT = [(7 * i + 3) % 200 for i in range(100)]


@contextmanager
def engine(folder: Path | None, kv_dtype: str, n_streams: int) -> Iterator[LLMEngine]:
    """An engine on a golden model; pieces of a block have 5 positions."""
    info = inspect_model(FOLDER)
    limits = Limits(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_num_queued_reqs=8,
        max_model_len=MAX_LEN,
        n_cells=256 * n_streams,
        n_streams=n_streams,
        vocab_size=info.vocab_size,
        max_step_time_s=1e9,
        kv_cell_bytes=info.kv_bytes_per_cell[kv_dtype],
        prefix_cache_dir=folder,
        enable_prefix_caching=folder is not None,
    )
    context = _core.Context(
        str(FOLDER),
        dtype="float32",
        kv_dtype=kv_dtype,
        n_cells=limits.n_cells,
        n_seq_max=4,
        n_batch=32,
        max_model_len=MAX_LEN,
        n_threads=1,
        n_streams=n_streams,
        nan_fill=True,
    )
    made = LLMEngine(Executor(Worker(context, _core.SamplerSpec, n_streams)), limits, seed=0)
    if made.disk_cache is not None:
        made.disk_cache._clock = lambda: 0.0  # otherwise computing is faster in so small a model
    try:
        yield made
    finally:
        made.close()


def complete(made: LLMEngine, name: str, prompt: list[int]) -> tuple[int, list[Any]]:
    """Return the number of cached prompt tokens, and the ids with the bits of their logprobs."""
    made.submit(ask(name, prompt, max_tokens=8, ignore_eos=True, logprobs=3, temperature=1.0, seed=4))
    n_cached, found = 0, []
    while made.requests.by_ordinal:
        if made.disk_cache is not None:
            if made.disk_cache._loads and (future := made.disk_cache._loads[0].future) is not None:
                wait([future], 30)
            made.disk_cache.resume(is_idle=False)
        for output in made.step(1000.0):
            assert output.error is None, output.error
            n_cached += output.num_cached_tokens
            found += bits(output)
    made.check()
    return n_cached, found


@pytest.mark.parametrize(("kv_dtype", "n_streams"), [("float32", 1), ("bfloat16", 2), ("int8", 1)])
def test_a_prefix_from_disk_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, n_streams: int
) -> None:
    monkeypatch.setattr("llaisys.engine.disk_cache.block_index.BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(
        "llaisys.engine.sessions.transfer.PIECE_BYTES",
        5 * inspect_model(FOLDER).kv_bytes_per_cell[kv_dtype],
    )
    prompts = {"same": PROMPT, "shorter": PROMPT[:70], "other end": [*PROMPT[:50], *range(40)]}
    with engine(None, kv_dtype, n_streams) as made:
        alone = {name: complete(made, name, prompt)[1] for name, prompt in prompts.items()}
    with engine(tmp_path, kv_dtype, n_streams) as made:
        assert complete(made, "first", PROMPT)[0] == 0
        assert made.disk_cache is not None
        made.disk_cache.drain(limit_s=60.0)
    n_loaded = {"same": 96, "shorter": 64, "other end": 48}
    for name, prompt in prompts.items():
        with engine(tmp_path, kv_dtype, n_streams) as made:
            assert complete(made, name, prompt) == (n_loaded[name], alone[name])
            assert made.stats().external_hit_tokens == n_loaded[name]
    with engine(tmp_path, kv_dtype, n_streams) as made:
        complete(made, "memory first", PROMPT[:40])
        assert complete(made, "same", PROMPT) == (96, alone["same"])
