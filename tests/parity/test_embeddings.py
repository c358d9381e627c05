"""Embeddings of the engine: they match pooled hidden states of transformers, with equal bits in any batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden import FOLDER
from llaisys.async_llm import AsyncLLM
from llaisys.config import Config
from llaisys.engine.worker import inspect_model
from llaisys.model_info import Pooling
from llaisys.sampling_params import SamplingParams
from llaisys.text.pooling_type import model_pooling
from parity.gguf_model import write_gguf
from parity.numpy_forward import Shape
from parity.random_model import random_weights
from parity.test_goldens import FOLDERS, GOLDENS, TOLERANCE

NAMES = count()
# Longer than a block of attention, no multiple of any batch.
LONG = np.random.default_rng(11).integers(0, 500, 333).tolist()


@asynccontextmanager
async def started(model: Path = FOLDER, **settings: Any) -> AsyncIterator[AsyncLLM]:
    service = await AsyncLLM.start(Config(model=str(model), dtype="float32", num_kv_cells=2048, **settings))
    try:
        yield service
    finally:
        await service.close()


async def embed(service: AsyncLLM, prompt: list[int], pooling: Pooling) -> bytes:
    (delta,) = [
        delta
        async for delta in service.generate(prompt, SamplingParams(), f"e{next(NAMES)}", pooling=pooling)
    ]
    assert (delta.finished, delta.outputs[0].finish_reason, delta.outputs[0].token_ids) == (True, "stop", [])
    assert delta.embedding is not None
    return delta.embedding


def bound(hidden: NDArray[np.float32], mean: NDArray[np.float64]) -> float:
    """Return the largest allowed error of a number of the normalized vector.

    Hidden states and their mean are correct to `TOLERANCE` of the largest number. The norm of the mean has
    up to sqrt(d) times that error, which adds to it.
    """
    error = TOLERANCE * float(np.abs(hidden).max())
    return error * (1 + np.sqrt(hidden.shape[1])) / float(np.linalg.norm(mean))


@pytest.mark.parametrize("folder", FOLDERS)
async def test_embeddings_are_pooled_from_the_reference_hidden_states(folder: str) -> None:
    golden = np.load(GOLDENS / folder / "golden.npz")
    async with started(GOLDENS / folder) as service:
        for i in range(3):
            prompt, hidden = golden[f"prompt_{i}"].tolist(), golden[f"hidden_{i}"]
            means: dict[Pooling, NDArray[np.float64]] = {
                "mean": hidden.astype(np.float64).mean(axis=0),
                "last": hidden[-1].astype(np.float64),
            }
            for pooling, mean in means.items():
                vector = np.frombuffer(await embed(service, prompt, pooling), "<f4")
                assert np.abs(vector - mean / np.linalg.norm(mean)).max() <= bound(hidden, mean)
                assert abs(float(np.linalg.norm(vector.astype(np.float64))) - 1) < 1e-6


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_the_same_bits_alone_chunked_batched_and_cached(pooling: Pooling) -> None:
    async with started(max_num_batched_tokens=512) as service:
        alone = await embed(service, LONG, pooling)
        again = await embed(service, LONG, pooling)
    async with started(max_num_batched_tokens=37, enable_prefix_caching=False) as service:
        chunked = await embed(service, LONG, pooling)
    async with started(max_num_batched_tokens=64, num_threads=1) as service:
        others: list[list[int]] = [LONG[:200], LONG[::-1], LONG[50:], [3], LONG[:201]]
        answer = service.generate(LONG[:20], SamplingParams(max_tokens=60, ignore_eos=True), "answer")
        await anext(answer)
        shared, *_ = await asyncio.gather(
            embed(service, LONG, pooling), *(embed(service, prompt, pooling) for prompt in others)
        )
        await answer.aclose()  # type: ignore[attr-defined]
    assert alone == again == chunked == shared


async def test_an_embedding_counts_as_a_request() -> None:
    async with started() as service:
        await embed(service, LONG, "mean")
        stats = service.stats()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.finished) == (len(LONG), 0, {"stop": 1})
        assert (stats.queue_time_s.count, stats.prefill_time_s.count, stats.e2e_request_latency_s.count) == (
            1,
            1,
            1,
        )
        assert stats.time_to_first_token_s.count == 0
        assert stats.engine.kv_cells_used == 0
        open_one = asyncio.ensure_future(embed(service, LONG[::-1], "mean"))
        await asyncio.sleep(0)
        open_one.cancel()
        await asyncio.gather(open_one, return_exceptions=True)
        await embed(service, [1], "mean")
        assert service.stats().engine.num_running == 0


async def test_embeddings_from_an_engine_process() -> None:
    async with started() as service:
        here = await embed(service, LONG, "mean")
    async with started(engine_process=True) as service:
        assert await embed(service, LONG, "mean") == here


def test_pooling_type_of_a_gguf_file(tmp_path: Path) -> None:
    shape = Shape(1, 16, 2, 1, 8, 24, 8, 10000.0, 1e-5, qkv_bias=False, qk_norm="none", tied=True)
    weights = random_weights(shape, 0)
    for number, want in ((None, "last"), (1, "mean"), (3, "last"), (2, "cls")):
        more = {} if number is None else {"pooling_type": number}
        path = write_gguf(tmp_path / "model.gguf", "llama", shape, weights, **more)
        assert model_pooling(inspect_model(path)) == want
