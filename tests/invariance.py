"""Runs of the engine in which a request must get the same bits, whatever happens around it."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from golden import FOLDER, Golden
from llaisys import _core
from llaisys.engine.engine import LLMEngine
from llaisys.engine.engine_output import EngineOutput
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import Worker
from llaisys.sampling_params import SamplingParams
from llaisys.stats import EngineStats

SEED = 20261121
MAX_NEW = 32

Answers = dict[tuple[str, int], list[tuple[int, bytes]]]


@dataclass(frozen=True)
class Model:
    """A model and the requests that it gets: prompts of up to `max_len - 48` tokens."""

    golden: Golden
    folder: Path = FOLDER
    n_requests: int = 200
    max_len: int = 112


@dataclass
class Setting:
    """The settings of one run."""

    n_cells: int = 8192
    n_threads: int = 2
    order: int | None = None
    n_open_max: int = 1000
    limits: dict[str, Any] = field(default_factory=dict)


ALONE = Setting(
    n_open_max=1,
    limits={
        "max_num_seqs": 2,
        "max_batch_size": 1,
        "max_num_batched_tokens": 256,
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


def requests(model: Model) -> list[EngineRequest]:
    """Return requests with shared prefixes, greedy and sampled, some with several choices."""
    rng = random.Random(SEED)
    golden, made = model.golden, []
    for i in range(model.n_requests):
        whole = rng.choice(golden.prompts)
        prompt = whole[: rng.randint(1, min(len(whole), model.max_len - 48))]
        prompt = prompt + [rng.randrange(golden.vocab_size) for _ in range(rng.choice([0, 1, 9]))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**32),
            max_tokens=rng.randint(1, MAX_NEW),
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


def run(model: Model, setting: Setting) -> tuple[Answers, EngineStats]:
    """Return the output of each choice, by request id and index."""
    n_requests = model.n_requests
    limits = Limits(
        **{
            "max_num_seqs": 32,
            "max_num_batched_tokens": 128,
            "max_num_queued_reqs": 2 * n_requests,
            "max_model_len": model.max_len,
            "n_cells": setting.n_cells,
            "vocab_size": model.golden.vocab_size,
            "max_step_time_s": 1e9,
            **setting.limits,
        }
    )
    context = _core.Context(
        str(model.folder),
        dtype="float32",
        n_cells=limits.n_cells,
        n_seq_max=limits.max_num_seqs,
        n_batch=limits.max_num_batched_tokens,
        max_model_len=model.max_len,
        n_threads=setting.n_threads,
        n_streams=limits.n_streams,
        n_states_kept=limits.n_states_kept,
        nan_fill=True,
    )
    engine = LLMEngine(Executor(Worker(context, _core.SamplerSpec, limits.n_streams)), limits, seed=0)
    queued = requests(model)
    if setting.order is not None:
        random.Random(setting.order).shuffle(queued)
    answers: Answers = {}
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
