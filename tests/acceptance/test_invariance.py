"""A request gets the same bits of tokens and logprobs whatever happens around it.

It runs alone, in a batch, in any order, in chunks, preempted, with a cached prefix, in scattered cells, in
several KV streams, and on any number of threads. With the NaN fill, a read of a free cell shows as NaN.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from golden import FOLDER, Golden, load_golden
from llaisys import _core
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import Worker
from llaisys.sampling_params import SamplingParams
from llaisys.stats import EngineStats

pytestmark = [pytest.mark.stage1, pytest.mark.two_cpus]
SEED = 20261121
N_REQUESTS = 200
MAX_LEN = 112


@dataclass
class Setting:
    """The settings of one run."""

    n_cells: int = 8192
    n_threads: int = 2
    order: int | None = None
    n_open_max: int = 2 * N_REQUESTS
    limits: dict[str, Any] = field(default_factory=dict)


ALONE = Setting(
    n_open_max=1,
    limits={
        "max_num_seqs": 2,
        "max_batch_size": 1,
        "max_num_batched_tokens": MAX_LEN,
        "enable_prefix_caching": False,
    },
)
SETTINGS = {
    "together": Setting(limits={"enable_prefix_caching": False}),
    "one thread": Setting(n_threads=1),
    "shuffled": Setting(order=1),
    "chunked": Setting(order=2, limits={"max_num_batched_tokens": 7, "max_num_seqs": 5}),
    "chunked without cache": Setting(
        limits={
            "max_num_batched_tokens": 13,
            "long_prefill_token_threshold": 5,
            "enable_prefix_caching": False,
        }
    ),
    "preempted": Setting(n_cells=224, limits={"max_num_seqs": 16}),
    "preempted without cache": Setting(
        n_cells=448, order=3, limits={"max_num_seqs": 16, "enable_prefix_caching": False}
    ),
    "prefixes evicted": Setting(n_cells=640, order=4, limits={"max_num_seqs": 4}),
    "fragmented": Setting(n_cells=1024, order=5, n_open_max=30, limits={"max_num_seqs": 24}),
    "small batches": Setting(order=6, limits={"max_batch_size": 3, "max_num_seqs": 9}),
    "two KV streams": Setting(n_cells=1024, order=7, limits={"n_streams": 2, "max_num_seqs": 16}),
    "four KV streams": Setting(n_cells=1024, limits={"n_streams": 4, "max_num_seqs": 16}),
}


def requests(golden: Golden, n: int) -> list[EngineRequest]:
    """Return requests with shared prefixes, greedy and sampled, some with several choices."""
    rng = random.Random(SEED)
    made = []
    for i in range(n):
        whole = rng.choice(golden.prompts)
        prompt = whole[: rng.randint(1, min(len(whole), 64))]
        prompt = prompt + [rng.randrange(golden.vocab_size) for _ in range(rng.choice([0, 1, 9]))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**32),
            max_tokens=rng.randint(1, 32),
            ignore_eos=True,
            repetition_penalty=rng.choice([1.0, 1.2]),
            logprobs=3,
        )
        made.append(
            EngineRequest(
                request_id=f"{i}",
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=(),
                arrival_s=0.0,
                deadline_s=1e9,
                client_id=rng.choice("xyz"),
            )
        )
    return made


def bits(output: EngineOutput) -> list[tuple[int, bytes]]:
    """Return ids with the bits of their logprobs."""
    entries = output.new_logprobs or []
    assert [entry.token_id for entry in entries] == output.new_token_ids
    return [
        (e.token_id, struct.pack(f"<{1 + len(e.top)}d", e.logprob, *(value for _, value in e.top)))
        for e in entries
    ]


def run(
    golden: Golden, setting: Setting, folder: Path = FOLDER, n_requests: int = N_REQUESTS
) -> tuple[dict[tuple[str, int], list[tuple[int, bytes]]], EngineStats]:
    """Return the output of each choice, by request id and index."""
    limits = Limits(
        **{
            "max_num_seqs": 32,
            "max_num_batched_tokens": 128,
            "max_num_queued_reqs": 2 * N_REQUESTS,
            "max_model_len": MAX_LEN,
            "n_cells": setting.n_cells,
            "vocab_size": golden.vocab_size,
            "max_step_time_s": 1e9,
            **setting.limits,
        }
    )
    context = _core.Context(
        str(folder),
        dtype="float32",
        n_cells=limits.n_cells,
        n_seq_max=limits.max_num_seqs,
        n_batch=limits.max_num_batched_tokens,
        max_model_len=MAX_LEN,
        n_threads=setting.n_threads,
        n_streams=limits.n_streams,
        nan_fill=True,
    )
    engine = LLMEngine(Executor(Worker(context, _core.SamplerSpec, limits.n_streams)), limits, seed=0)
    queued = requests(golden, n_requests)
    if setting.order is not None:
        random.Random(setting.order).shuffle(queued)
    answers: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
    step = n_over = 0
    while queued or engine.has_work():
        while queued and len(queued) + setting.n_open_max > n_requests - n_over:
            engine.submit(queued.pop())
        for output in engine.step(float(step)):
            assert output.error is None, output.error
            n_over += output.last
            answers.setdefault((output.request_id, output.index), []).extend(bits(output))
        step += 1
    stats = engine.stats()
    engine.close()
    return answers, stats


@pytest.fixture(scope="module")
def alone(golden: Golden) -> dict[tuple[str, int], list[tuple[int, bytes]]]:
    """Run each request alone."""
    return run(golden, ALONE)[0]


@pytest.mark.parametrize("name", [*SETTINGS])
def test_the_same_bits(golden: Golden, alone: Any, name: str) -> None:
    setting = SETTINGS[name]
    answers, stats = run(golden, setting)
    wrong = [key for key, want in alone.items() if answers.get(key) != want]
    assert answers.keys() == alone.keys()
    assert not wrong, f"seed {SEED}: {len(wrong)} choices differ, the first is {wrong[0]}"
    if name.startswith("preempted"):
        assert stats.num_preempted > 0
    if setting.limits.get("enable_prefix_caching", True):
        assert stats.prefix_hit_tokens > 0
    if name == "prefixes evicted":
        assert stats.num_evicted_cells > 0


# What the first model lacks: multipliers, norms after the rotation, biases in every projection.
FAMILIES = ("granite4_bf16", "hunyuan_dense_bf16", "llama_bias_bf16")
FAMILY_SETTINGS = {
    "chunked": SETTINGS["chunked"],
    "preempted": Setting(n_cells=128, limits={"max_num_seqs": 16}),
    "two KV streams": SETTINGS["two KV streams"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_of_other_families(family: str) -> None:
    folder, n = FOLDER.parent / family, 40
    golden = load_golden(folder)
    alone, _ = run(golden, ALONE, folder, n)
    for name, setting in FAMILY_SETTINGS.items():
        answers, stats = run(golden, setting, folder, n)
        assert answers == alone, f"seed {SEED}: {name}"
        assert stats.num_preempted > 0 or name != "preempted"
