"""Pooling requests in the engine: each hidden state counts once for any chunking, batch and preemption."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from fakes import core
from fakes.asks import limits
from fakes.engines import NOW, Engine
from llaisys.engine.limits import token_limit
from llaisys.errors import ContextLengthError, RejectedError
from llaisys.model_info import Pooling
from llaisys.outputs import FinishReason
from llaisys.sampling_params import SamplingParams

PROMPT = list(range(1, 31))


def embedding(prompt: list[int], pooling: Pooling) -> list[float]:
    """Return the embedding by its definition, in Python floats, one row after the other."""
    rows = [core.hidden_of(prompt[: i + 1]) for i in range(len(prompt))]
    chosen = {"last": rows[-1:], "cls": rows[:1]}.get(pooling, rows)
    rows = [np.array(row, np.float32).tolist() for row in chosen]
    if pooling == "max":
        rows = [[max(column) for column in zip(*rows, strict=True)]]
    total = [0.0] * core.D_MODEL
    for row in rows:
        total = [a + b for a, b in zip(total, row, strict=True)]
    mean = [x / len(rows) for x in total]
    length = math.sqrt(math.fsum(x * x for x in mean))
    return np.array([x / length for x in mean], np.float32).tolist()


def embedding_of(made: Engine, name: str) -> list[float]:
    end = made.ends[name]
    assert (end.finish_reason, end.last, end.new_token_ids) == (FinishReason.STOP, True, [])
    assert end.embedding is not None
    return np.frombuffer(end.embedding, "<f4").tolist()


BUDGETS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 64},
    {"max_num_batched_tokens": 7},
    {"max_num_batched_tokens": 29},  # the last token of the prompt is a chunk of its own
    {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("changes", BUDGETS)
@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "max"])
@pytest.mark.parametrize("others", [False, True])
def test_embeddings_do_not_depend_on_chunks_or_the_batch(
    changes: dict[str, Any], pooling: Pooling, others: bool
) -> None:
    made = Engine(**changes)
    if others:
        made.submit("x", prompt=[9, 8, 7])
        made.step()
        made.submit("y", prompt=PROMPT[:20])
    made.submit("a", prompt=PROMPT, pooling=pooling)
    made.submit("b", prompt=PROMPT[:1], pooling=pooling)
    made.finish()
    assert embedding_of(made, "a") == embedding(PROMPT, pooling)
    assert embedding_of(made, "b") == embedding(PROMPT[:1], pooling)


def test_an_embedding_that_is_not_normalized() -> None:
    made = Engine(max_num_batched_tokens=7)
    made.submit("a", prompt=PROMPT, pooling="last", normalize=False)
    made.finish()
    assert embedding_of(made, "a") == np.array(core.hidden_of(PROMPT), np.float32).tolist()


@pytest.mark.parametrize("changes", BUDGETS)
@pytest.mark.parametrize("others", [False, True])
def test_scores_are_of_the_logprobs_of_two_tokens(changes: dict[str, Any], others: bool) -> None:
    made = Engine(**changes)
    if others:
        made.submit("x", prompt=[9, 8, 7])
        made.submit("y", prompt=PROMPT[:20], pooling="mean")
    for name, prompt in (("a", PROMPT), ("again", PROMPT), ("b", PROMPT[:1])):
        made.submit(name, prompt=prompt, pooling="score", score_token_ids=(5, 3))
        made.finish()
        end = made.ends[name]
        assert (end.finish_reason, end.last, end.new_token_ids) == (FinishReason.STOP, True, [])
        no, yes = (math.exp(core.prompt_logprob(prompt, id)) for id in (5, 3))
        assert end.score == pytest.approx(yes / (no + yes), rel=1e-6)
    assert made.ends["a"].score == made.ends["again"].score
    if changes.get("enable_prefix_caching", True):
        assert made.cached["again"] == len(PROMPT) - 1


def test_a_score_that_is_not_finite_fails_alone() -> None:
    made = Engine()
    made.submit("bad", prompt=[1, core.NON_FINITE], pooling="score", score_token_ids=(5, 3))
    made.submit("good", prompt=[1, 2], pooling="score", score_token_ids=(5, 3))
    made.finish()
    assert made.reasons() == {"bad": FinishReason.ERROR, "good": FinishReason.STOP}


def test_a_cached_prompt_serves_last_pooling_and_is_recomputed_for_the_mean() -> None:
    made = Engine()
    made.submit("a", prompt=PROMPT, max_tokens=1)
    made.finish()
    n_rows = made.context.n_rows
    made.submit("last", prompt=PROMPT, pooling="last")
    made.finish()
    assert made.context.n_rows == n_rows + 1
    assert made.cached["last"] == len(PROMPT) - 1
    made.submit("mean", prompt=PROMPT, pooling="mean")
    made.finish()
    assert made.context.n_rows == n_rows + 1 + len(PROMPT)
    assert made.cached["mean"] == 0
    assert embedding_of(made, "last") == embedding(PROMPT, "last")
    assert embedding_of(made, "mean") == embedding(PROMPT, "mean")


def test_pooled_prompts_are_cached_for_other_requests() -> None:
    made = Engine()
    made.submit("a", prompt=PROMPT, pooling="mean")
    made.finish()
    made.submit("b", prompt=[*PROMPT, 77])
    made.finish()
    assert made.cached["b"] == len(PROMPT)
    assert made.tokens["b"] == core.answer([*PROMPT, 77], 10)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_preempted_prompt_continues_from_the_pooled_rows(pooling: Pooling) -> None:
    """Two decodes leave the prompt one token per step, until the prompt is preempted."""
    made = Engine(n_cells=96, max_model_len=64, max_num_batched_tokens=3)
    made.submit("a", prompt=[7] * 20, max_tokens=40)
    made.submit("b", prompt=[8] * 20, max_tokens=40)
    made.submit("c", prompt=PROMPT, pooling=pooling)
    pooled = made.engine.requests.by_ordinal[2]
    while not pooled.num_preempted:
        made.step()
    assert pooled.pool is not None
    if pooling == "mean":
        assert 0 < pooled.pool.next < len(PROMPT)
    made.finish()
    assert embedding_of(made, "c") == embedding(PROMPT, pooling)


def test_a_non_finite_hidden_state_fails_only_its_request_and_is_not_cached() -> None:
    made = Engine()
    faulty = [1, 2, core.NON_FINITE, 4]
    made.submit("a", prompt=faulty, pooling="mean")
    made.submit("b", prompt=PROMPT, pooling="mean")
    made.finish()
    assert made.ends["a"].finish_reason is FinishReason.ERROR
    assert made.ends["a"].embedding is None
    assert embedding_of(made, "b") == embedding(PROMPT, "mean")
    assert made.engine.stats().kv_cells_retained == len(PROMPT)


def test_a_row_rejected_by_the_core_fails_only_its_request() -> None:
    made = Engine()
    made.submit("a", prompt=[1, core.REFUSED, 4], pooling="mean")
    made.submit("b", prompt=PROMPT, pooling="last")
    made.finish()
    assert made.ends["a"].finish_reason is FinishReason.ERROR
    assert embedding_of(made, "b") == embedding(PROMPT, "last")


def test_cancel_and_timeout_end_a_pooling_request_once() -> None:
    made = Engine(max_num_batched_tokens=4)
    made.submit("a", prompt=PROMPT, pooling="mean")
    made.submit("b", prompt=PROMPT[::-1], pooling="mean", deadline_s=NOW + 5)
    made.step()
    made.engine.cancel("a")
    made.step(now_s=NOW + 6)
    assert made.reasons() == {"a": FinishReason.ABORT, "b": FinishReason.TIMEOUT}
    made.finish()
    assert made.over == {"a", "b"}


def test_a_pooled_prompt_may_fill_the_context() -> None:
    made = Engine()
    made.submit("a", prompt=[5] * 64, pooling="last")
    made.finish()
    assert embedding_of(made, "a") == embedding([5] * 64, "last")
    with pytest.raises(ContextLengthError, match="65 tokens, the context is 64"):
        made.submit("b", prompt=[5] * 65, pooling="last")


def test_a_pooling_request_has_the_limits_of_a_prompt() -> None:
    params = SamplingParams()
    assert token_limit([1, 2], params, limits(), pooling="mean") == 2
    with pytest.raises(ContextLengthError, match="3 tokens, max_input_tokens allows at most 2"):
        token_limit([1, 2, 3], params, limits(max_input_tokens=2), pooling="mean")
    with pytest.raises(RejectedError, match="empty"):
        token_limit([], params, limits(), pooling="mean")
    with pytest.raises(RejectedError, match=f"token id {core.VOCAB_SIZE}"):
        token_limit([core.VOCAB_SIZE], params, limits(), pooling="mean")


@pytest.mark.parametrize("seed", range(24))
def test_embeddings_under_random_preemptions_and_cancels(seed: int) -> None:
    """Completions and embeddings of related prompts: embeddings equal the definition bit for bit."""
    rng = random.Random(seed)
    n_streams = 1 + seed % 2
    made = Engine(
        max_num_seqs=5,
        n_cells=n_streams * rng.choice([48, 56, 64]),
        n_streams=n_streams,
        max_model_len=48,
        max_num_batched_tokens=rng.choice([4, 6, 40]),
        max_num_queued_reqs=64,
        enable_prefix_caching=seed % 4 != 0,
    )
    heads = [[rng.randrange(1, 250) for _ in range(30)] for _ in range(2)]
    pooled: dict[str, tuple[list[int], Pooling]] = {}
    for i in range(30):
        head = rng.choice(heads)
        prompt = head[: rng.randint(1, 30)] + [rng.randrange(1, 250) for _ in range(rng.randint(0, 12))]
        if rng.random() < 0.6:
            pooling: Pooling = "mean" if rng.random() < 0.6 else "last"
            pooled[f"{i}"] = prompt, pooling
            made.submit(f"{i}", prompt=prompt, pooling=pooling, priority=1)
        else:
            made.submit(f"{i}", prompt=prompt[:20], max_tokens=rng.randint(9, 27), ignore_eos=True)
        made.step(rng.randint(0, 6))
        if rng.random() < 0.1:
            made.engine.cancel(f"{rng.randint(0, i)}")
    made.finish()
    assert len(made.over) == 30
    for name, (prompt, pooling) in pooled.items():
        if made.ends[name].finish_reason is not FinishReason.ABORT:
            assert embedding_of(made, name) == embedding(prompt, pooling), (seed, name)
