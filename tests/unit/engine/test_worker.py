"""The worker: flat arrays in, token ids out; a rejected call keeps no sequence id."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fakes import core
from fakes.asks import ask
from llaisys.engine.batch import Batch, Chunk, StepResult
from llaisys.engine.memory import WorkerSettings
from llaisys.engine.prefix_cache import AddNode, SplitNode, TrimNode
from llaisys.engine.request import BrokenInvariant, Request, Running
from llaisys.engine.worker import Worker, available_isas, inspect_model, open_worker
from llaisys.errors import RejectedError, RequestFailedError


@pytest.fixture
def context() -> core.Context:
    return core.Context("fake", n_cells=64, n_seq_max=2, max_model_len=32)


@pytest.fixture
def worker(context: core.Context) -> Worker:
    return Worker(context, core.SamplerSpec)  # type: ignore[arg-type]


def request(**changes: Any) -> Request:
    return Request(ask(**changes), ordinal=0, seed=5, token_limit=32)


def opened(worker: Worker, **changes: Any) -> Request:
    """Return a request with a sequence."""
    made = request(**changes)
    made.state = Running(worker.open_sequence(made))
    return made


def computed(made: Request, n: int, token: int) -> None:
    """Update a request as the engine does after a step: `n` tokens computed, `token` sampled."""
    made.num_computed += n
    made.append_token(token)


def test_a_step_that_cannot_be_a_cuda_graph_is_logged(
    worker: Worker, context: core.Context, caplog: pytest.LogCaptureFixture
) -> None:
    made = opened(worker)
    context.graph_refusal = "no graph of 4 rows"
    worker.execute_model(Batch([], [Chunk(made, 0, [1], samples=False)]))
    assert [record.message for record in caplog.records] == ["no graph of 4 rows"]


def test_chunks_of_two_sequences_in_one_decode(worker: Worker, context: core.Context) -> None:
    a, b = opened(worker), opened(worker, prompt=[7] * 9)
    first = worker.execute_model(
        Batch([], [Chunk(a, 0, [1, 2, 3], samples=True), Chunk(b, 0, [7] * 4, samples=False)])
    )
    assert first == StepResult([core.answer([1, 2, 3], 1)[0], -1])
    computed(a, 3, 50)
    second = worker.execute_model(Batch([a], [Chunk(b, 4, [7] * 5, samples=True)]))
    assert second == StepResult([core.answer([1, 2, 3, 50], 1)[0], core.answer([7] * 9, 1)[0]])
    assert (context.n_decodes, worker.n_cells_used, worker.n_cells_free) == (2, 13, (51,))
    worker.close_sequence(a.seq_id)
    worker.close_sequence(b.seq_id)
    worker.check()
    assert (worker.n_cells_used, worker.n_seq_free) == (0, 2)


def test_a_batch_is_split_between_items(worker: Worker) -> None:
    a, b = opened(worker), opened(worker)
    chunks = [Chunk(b, 0, [1], samples=True), Chunk(b, 1, [2], samples=True)]
    batch = Batch([a], chunks)
    assert [batch.part(i, i + 1).request(0) for i in range(3)] == [a, b, b]
    assert (len(batch), len(batch.part(0, 2)), batch.part(1, 3)) == (3, 2, Batch([], chunks))
    whole = StepResult([1], errors={0: ValueError()})  # type: ignore[dict-item]
    whole.extend(StepResult([2, 3], rejected=[1]))
    assert (whole.token_ids, list(whole.errors), whole.rejected) == ([1, 2, 3], [0], [2])


def test_a_request_without_a_sequence_has_no_rows(worker: Worker) -> None:
    with pytest.raises(BrokenInvariant, match="no sequence"):
        worker.execute_model(Batch([request()], []))


def test_prefix_cache_edits_change_the_cells(worker: Worker, context: core.Context) -> None:
    a = opened(worker)
    worker.execute_model(Batch([], [Chunk(a, 0, [1, 2, 3, 4, 5, 6], samples=False)]))
    worker.edit_cache([AddNode(1, 0, 6), SplitNode(1, 4, 2), TrimNode(2, 5)], a.seq_id)
    worker.close_sequence(a.seq_id)
    assert worker.n_cells_used == 5
    b = opened(worker)
    worker.attach_nodes([(1, 0, 4), (2, 4, 5)], b.seq_id)
    c = opened(worker)
    worker.fork_sequence(b.seq_id, c.seq_id, 3)
    assert (worker.n_cells_used, context.kv_seq_pos_max(b.seq_id)) == (5, 4)
    worker.execute_model(Batch([], [Chunk(c, 3, [9, 9], samples=False)]))
    assert worker.n_cells_used == 7
    worker.relink_nodes([(1, 3, 4), (2, 4, 5)], c.seq_id)
    assert (worker.n_cells_used, context.kv_seq_pos_max(c.seq_id)) == (5, 4)
    worker.check()


def test_fork_copies_between_kv_streams(context: core.Context) -> None:
    context = core.Context("fake", n_cells=64, n_seq_max=2, max_model_len=32, n_streams=2)
    worker = Worker(context, core.SamplerSpec, 2)  # type: ignore[arg-type]
    a, b = request(), request()
    a.state, b.state = Running(worker.open_sequence(a, 0), 0), Running(worker.open_sequence(b, 1), 1)
    worker.execute_model(Batch([], [Chunk(a, 0, [1, 2, 3], samples=False)]))
    worker.fork_sequence(a.seq_id, b.seq_id, 2)
    assert worker.n_cells_free == (29, 30)


def test_a_request_becomes_a_sampler_spec(worker: Worker, context: core.Context) -> None:
    source = request(
        temperature=0.5,
        top_k=3,
        logit_bias={4: 1.5},
        min_tokens=2,
        stop_token_ids=[9],
        logprobs=1,
        allowed_token_ids=[1, 2],
        bad_word_ids=((3, 4), (5,)),
        prompt_logprobs=0,
    )
    source.index = 3
    seq = worker.open_sequence(source)
    want = core.SamplerSpec(
        temperature=0.5,
        top_k=3,
        logit_bias=[(4, 1.5)],
        min_tokens=2,
        stop_ids=[9, 256, 257],
        seed=5,
        choice=3,
        top_logprobs=1,
        allowed_ids=[1, 2],
        bad_words=[[3, 4], [5]],
        prompt_logprobs=0,
    )
    assert context._lent[seq].spec == want


def test_logprobs_belong_to_the_row_that_requested_them(worker: Worker) -> None:
    a, b = opened(worker), opened(worker, logprobs=2)
    result = worker.execute_model(Batch([], [Chunk(a, 0, [1], samples=True), Chunk(b, 0, [1], samples=True)]))
    (item,) = result.logprobs
    entry = result.logprobs[item]
    assert (item, entry.token_id, entry.rank) == (1, result.token_ids[1], 1)
    assert entry.top[0] == (entry.token_id, -0.5)
    assert len(entry.top) == 2


def test_a_faulty_row_fails_alone(worker: Worker) -> None:
    a, b = opened(worker), opened(worker)
    bad = Chunk(a, 0, [1, core.NON_FINITE], samples=True)
    result = worker.execute_model(Batch([], [bad, Chunk(b, 0, [1], samples=True)]))
    assert isinstance(result.errors.pop(0), RequestFailedError)
    assert (result.errors, result.rejected) == ({}, [])
    assert result.token_ids[1] == core.answer([1], 1)[0]


def test_a_rejected_sampler_releases_its_sequence_id(worker: Worker, context: core.Context) -> None:
    with pytest.raises(RejectedError, match="logit_bias"):
        worker.open_sequence(request(logit_bias={core.REFUSED: 1.0}))
    assert context.n_seq_free == 2
    context.set_sampler = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        worker.open_sequence(request())
    assert context.n_seq_free == 2


@pytest.mark.usefixtures("fake_core")
def test_open_describe_and_close_a_worker() -> None:
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
    rejected: list[Exception] = []

    def use_from_another_thread() -> None:
        with pytest.raises(RejectedError, match="thread") as caught:
            worker.open_sequence(request())
        rejected.append(caught.value)

    thread = threading.Thread(target=use_from_another_thread)
    thread.start()
    thread.join()
    assert len(rejected) == 1
    worker.close()
    worker.close()
    with pytest.raises(RejectedError, match="closed"):
        worker.open_sequence(request())


@pytest.mark.usefixtures("fake_core")
def test_model_info_comes_from_the_core() -> None:
    info = inspect_model(Path("fake"))
    assert (info.path, info.eos_token_ids, info.tokenizer) == ("fake", [256, 257], None)
    assert available_isas() == ["fake"]
