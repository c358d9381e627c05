"""Flat arrays in, ids out; nothing stays lent after a refusal."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fakes import core
from fakes.asks import ask
from llaisys.engine.request import Request
from llaisys.engine.worker import (
    Chunk,
    ChunkResult,
    Worker,
    WorkerSettings,
    available_isas,
    inspect_model,
    open_worker,
)
from llaisys.errors import RejectedError, RequestFailedError


@pytest.fixture
def context() -> core.Context:
    return core.Context("fake", n_cells=64, n_seq_max=2, max_model_len=32)


@pytest.fixture
def worker(context: core.Context) -> Worker:
    return Worker(context, core.SamplerSpec)  # type: ignore[arg-type]


def request(**changes: Any) -> Request:
    return Request(ask(**changes), ordinal=0, seed=5, token_limit=32)


def test_chunks_of_two_sequences_in_one_decode(worker: Worker, context: core.Context) -> None:
    a, b = worker.open_sequence(request()), worker.open_sequence(request(prompt=[7] * 9))
    results = worker.run([Chunk(a, 0, [1, 2, 3], samples=True), Chunk(b, 0, [7] * 4, samples=False)])
    assert results == [ChunkResult(core.answer([1, 2, 3], 1)[0]), ChunkResult()]
    results = worker.run([Chunk(b, 4, [7] * 5, samples=True), Chunk(a, 3, [50], samples=True)])
    want = [core.answer([7] * 9, 1)[0], core.answer([1, 2, 3, 50], 1)[0]]
    assert [r.token_id for r in results] == want
    assert (context.n_decodes, worker.n_cells_used) == (2, 13)
    worker.close_sequence(a)
    worker.close_sequence(b)
    worker.check()
    assert (worker.n_cells_used, context.n_seq_free) == (0, 2)


def test_the_request_becomes_the_samplers_spec(worker: Worker, context: core.Context) -> None:
    seq = worker.open_sequence(
        request(temperature=0.5, top_k=3, logit_bias={4: 1.5}, min_tokens=2, stop_token_ids=[9], logprobs=1)
    )
    want = core.SamplerSpec(
        temperature=0.5,
        top_k=3,
        logit_bias=[(4, 1.5)],
        min_tokens=2,
        stop_ids=[256, 257, 9],
        seed=5,
        top_logprobs=1,
    )
    assert context._lent[seq].spec == want


def test_logprobs_go_to_the_row_that_asked(worker: Worker) -> None:
    a, b = worker.open_sequence(request()), worker.open_sequence(request(logprobs=2))
    plain, wanted = worker.run([Chunk(a, 0, [1], samples=True), Chunk(b, 0, [1], samples=True)])
    assert plain.logprobs is None
    assert wanted.logprobs is not None
    assert (wanted.logprobs.token_id, wanted.logprobs.rank) == (wanted.token_id, 1)
    assert wanted.logprobs.top[0] == (wanted.token_id, -0.5)
    assert len(wanted.logprobs.top) == 2


def test_a_faulty_row_is_its_own_error(worker: Worker) -> None:
    a, b = worker.open_sequence(request()), worker.open_sequence(request())
    bad, good = worker.run([Chunk(a, 0, [1, core.NON_FINITE], samples=True), Chunk(b, 0, [1], samples=True)])
    assert isinstance(bad.error, RequestFailedError)
    assert "not finite" in str(bad.error)
    assert good.token_id == core.answer([1], 1)[0]


def test_a_refused_sampler_gives_its_id_back(worker: Worker, context: core.Context) -> None:
    with pytest.raises(RejectedError, match="logit_bias"):
        worker.open_sequence(request(logit_bias={core.REFUSED: 1.0}))
    assert context.n_seq_free == 2
    context.set_sampler = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        worker.open_sequence(request())
    assert context.n_seq_free == 2


@pytest.mark.usefixtures("fake_core")
def test_open_describe_close() -> None:
    settings = WorkerSettings(
        path=Path("fake"),
        dtype="auto",
        kv_dtype="bfloat16",
        isa="auto",
        n_cells=8,
        n_seq_max=1,
        n_batch=4,
        max_model_len=8,
        n_threads=1,
    )
    worker = open_worker(settings)
    assert worker.vocab_size == core.VOCAB_SIZE
    assert worker.describe() == "fake, 0 MiB of weights, 8 KV cells"
    refused: list[Exception] = []

    def elsewhere() -> None:
        with pytest.raises(RejectedError, match="thread") as caught:
            worker.open_sequence(request())
        refused.append(caught.value)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1
    worker.close()
    worker.close()
    with pytest.raises(RejectedError, match="closed"):
        worker.open_sequence(request())


@pytest.mark.usefixtures("fake_core")
def test_facts_come_from_the_core() -> None:
    info = inspect_model(Path("fake"))
    assert (info.path, info.eos_token_ids, info.tokenizer) == ("fake", [256, 257], None)
    assert available_isas() == ["fake"]
