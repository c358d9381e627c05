"""A request gets the same bits whatever happens around it, for each way in which a model rotates.

The suite of `acceptance/test_invariance.py` with fewer requests, and the same cells in forked sequences and
in another context, as a saved session is restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from golden import load_golden
from invariance import ALONE, SEED, SETTINGS, Model, run
from runner import LOGITS, Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
# Folder and `max_model_len`. The context chooses the factors of LongRoPE; the other mechanisms are heads that
# are rotated in part, layers without rotation, layers rotated in two ways, queries scaled by position,
# pairs of neighbors, attention sinks with a window in every other layer, and heads of two widths with layers
# that read the keys and values of others.
MODELS = [
    ("phi4_mini_bf16", 112),
    ("phi4_mini_bf16", 176),
    ("smollm3_bf16", 112),
    ("olmo3_bf16", 112),
    ("ministral3_bf16", 112),
    ("glm4_bf16", 112),
    ("ernie4_5_bf16", 112),
    ("granite4_bf16", 112),
    ("hunyuan_dense_bf16", 112),
    ("llama_bias_bf16", 112),
    ("gpt_oss_bf16", 112),
    ("gpt_oss_mxfp4", 112),
    ("gemma4_bf16", 112),
    ("gemma4_moe_bf16", 112),
]
NAMES = ["chunked", "preempted", "prefixes evicted", "two KV streams"]
N_REQUESTS = 24


@pytest.fixture(params=MODELS, ids=lambda param: f"{param[0]}-{param[1]}")
def model(request: pytest.FixtureRequest) -> Model:
    name, max_len = request.param
    return Model(load_golden(GOLDENS / name), GOLDENS / name, N_REQUESTS, max_len)


def test_the_same_bits(model: Model) -> None:
    alone, _ = run(model, replace(ALONE, n_threads=1))
    hits = preempted = 0
    for name in NAMES:
        cells = model.max_len if name == "preempted" else SETTINGS[name].n_cells
        answers, stats = run(model, replace(SETTINGS[name], n_cells=cells, n_threads=1))
        wrong = [key for key, want in alone.items() if answers.get(key) != want]
        assert answers.keys() == alone.keys()
        assert not wrong, f"{name}, seed {SEED}: {len(wrong)} choices differ, the first is {wrong[0]}"
        hits, preempted = hits + stats.prefix_hit_tokens, preempted + stats.num_preempted
    assert hits > 0
    assert preempted > 0


class Sequence:
    """A sequence of one context."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.id, self.n = runner, runner.context.seq_acquire(), 0

    def extend(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens; return their logits."""
        logits = self.runner.extend(self.id, tokens, self.n, LOGITS).logits
        assert logits is not None
        self.n += len(tokens)
        return logits


@pytest.fixture
def runners(model: Model) -> Iterator[list[Runner]]:
    with (
        Runner(model.folder, max_model_len=model.max_len) as first,
        Runner(model.folder, max_model_len=model.max_len) as second,
    ):
        yield [first, second]


def test_forked_and_restored_cells_give_the_same_bits(model: Model, runners: list[Runner]) -> None:
    first, second = runners
    tokens = [(7 * i + 3) % model.golden.vocab_size for i in range(90)]
    whole = Sequence(first)
    whole.extend(tokens[:60])
    fork, restored = Sequence(first), Sequence(second)
    first.context.kv_seq_cp(whole.id, fork.id, -1, -1)
    first.context.kv_node_cache(1, whole.id, 0, 60)
    data = first.context.kv_node_export(1, 0, 60)
    assert first.context.fingerprint() == second.context.fingerprint()
    second.context.kv_node_import(1, 0, 0, data)
    second.context.kv_node_attach(1, restored.id, 0, 60)
    fork.n = restored.n = 60
    want = whole.extend(tokens[60:])
    assert np.array_equal(fork.extend(tokens[60:]), want)
    assert np.array_equal(restored.extend(tokens[60:]), want)


def test_contexts_with_other_factors_of_longrope_have_other_fingerprints() -> None:
    folder = GOLDENS / "phi4_mini_bf16"
    fingerprints = []
    for max_model_len in (64, 128, 129, 4096):
        with Runner(folder, max_model_len=max_model_len) as runner:
            fingerprints.append(runner.context.fingerprint())
    assert fingerprints[0] == fingerprints[1] != fingerprints[2] == fingerprints[3]
