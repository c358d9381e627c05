"""Speculative decoding changes no token, logprob bit, finish reason or count, whatever is drafted.

400 seeded requests on a golden model and some on SmolLM2 with grammars: without drafts, with right, wrong and
random ones, and with those of each proposer, alone and in batches, under preemption, cancels and short cells.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from fakes.drafts import ScriptedSpeculator
from golden import FOLDER, load_golden
from llaisys import _core
from llaisys.config import load_config
from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.grammar import GrammarCompiler
from llaisys.engine.limits import Limits
from llaisys.engine.request import EngineRequest, Request
from llaisys.engine.spec_decode.ngram import NgramProposer
from llaisys.engine.spec_decode.planner import CostCurve, DraftPlanner
from llaisys.engine.spec_decode.speculator import Speculator
from llaisys.engine.spec_decode.suffix import SuffixProposer
from llaisys.engine.worker import Worker
from llaisys.errors import LlaisysError
from llaisys.model_assets import load_model_assets
from llaisys.outputs import FinishReason
from llaisys.sampling_params import SamplingParams
from llaisys.sampling_params import StructuredOutputsParams as Spec
from schemas import schema

SEED = 20261123
MAX_LEN = 160
GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


@dataclass
class Completion:
    """What a choice returned: ids with the bits of their logprobs, and its end."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    end: tuple[FinishReason, int | None, str] | None = None


Completions: TypeAlias = dict[tuple[str, int], Completion]
MakeSpeculator: TypeAlias = Callable[[Completions], Any]


@dataclass
class Model:
    """A model under test and the settings of its context."""

    path: Path
    dtype: str
    vocab_size: int
    compiler: GrammarCompiler | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass
class Setting:
    """The settings of one run. `n_open`: requests that are open at a time."""

    n_open: int = 32
    n_cells: int = 8192
    cancels: bool = False
    limits: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)


class FreeRows(CostCurve):
    """A cost curve on which drafts cost nothing, so that every proposal is verified."""

    def __init__(self) -> None:
        super().__init__({1: 1.0})

    def observe(self, n_rows: int, seconds: float) -> None:
        """Ignore the times of this machine."""


class Guarded(Speculator):
    """A Speculator that counts accepted and rejected drafts."""

    n_accepted = n_rejected = 0

    def record_accepted(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        super().record_accepted(request, n_drafts, n_accepted)
        self.n_accepted += n_accepted
        self.n_rejected += n_drafts - n_accepted


def scripted(vocab_size: int) -> MakeSpeculator:
    def make(want: Completions) -> ScriptedSpeculator:
        def next_tokens(request: Request, n: int) -> Sequence[int]:
            ids = want[request.request_id, request.index].ids
            return ids[request.num_output : request.num_output + n]

        return ScriptedSpeculator(SEED, vocab_size, next_tokens)

    return make


def ngram(_: Completions) -> Guarded:
    return Guarded(NgramProposer(1, 4), DraftPlanner(FreeRows()), 8)


def suffix(_: Completions) -> Guarded:
    return Guarded(SuffixProposer(24, 1000, 1.0, 0.1), DraftPlanner(FreeRows()), 16)


def run(
    model: Model, requests: Sequence[EngineRequest], setting: Setting, speculator: Any = None
) -> tuple[Completions, int]:
    """Run the requests; return the completions and the number of preemptions."""
    limits = Limits(
        **{
            "max_num_seqs": 32,
            "max_num_batched_tokens": 128,
            "max_num_queued_reqs": 2 * len(requests),
            "max_model_len": MAX_LEN,
            "n_cells": setting.n_cells,
            "vocab_size": model.vocab_size,
            "max_step_time_s": 1e9,
            **setting.limits,
        }
    )
    context = _core.Context(
        str(model.path),
        dtype=model.dtype,
        n_cells=limits.n_cells,
        n_seq_max=limits.max_num_seqs,
        n_batch=limits.max_num_batched_tokens,
        max_model_len=MAX_LEN,
        nan_fill=True,
        **{"n_threads": 1, **setting.context},
    )
    worker = Worker(context, _core.SamplerSpec, limits.n_streams)
    engine = LLMEngine(Executor(worker), limits, 0, model.compiler, speculator)
    queued, completions, n_open, step = [*requests], Completions(), 0, 0
    rng = random.Random(SEED)
    while queued or engine.has_work():
        while queued and n_open < setting.n_open:
            engine.submit(queued.pop())
            n_open += 1
        for output in engine.step(float(step)):
            completion = completions.setdefault((output.request_id, output.index), Completion())
            assert completion.end is None
            completion.ids += output.new_token_ids
            for entry in output.new_logprobs or ():
                values = (entry.logprob, *(value for _, value in entry.top))
                completion.logprobs.append(struct.pack(f"<{len(values)}d", *values))
            n_open -= output.last
            if output.finish_reason is not None:
                completion.end = output.finish_reason, output.stop_reason, _text_of(output.error)
            elif setting.cancels and rng.random() < 0.02:
                engine.cancel(output.request_id)
        step += 1
    engine.check()
    stats = engine.stats()
    assert stats.kv_cells_used == 0
    engine.close()
    return completions, stats.num_preempted


def _text_of(error: LlaisysError | None) -> str:
    return "" if error is None else str(error)


def compare(want: Completions, got: Completions) -> None:
    """Assert that all completions are equal; a canceled one is the beginning of its completion."""
    assert got.keys() == want.keys()
    for key, completion in got.items():
        expected = want[key]
        if completion.end is not None and completion.end[0] is FinishReason.ABORT:
            n = len(completion.ids)
            expected = Completion(expected.ids[:n], expected.logprobs[:n], completion.end)
        assert completion == expected, f"seed {SEED}: {key} differs"


def parameters(rng: random.Random, vocab_size: int, repeated: Sequence[int]) -> SamplingParams:
    """Return random parameters. The biases make most outputs repeat a few tokens, so that proposers match."""
    bias = dict.fromkeys(repeated, 6.0) if rng.random() < 0.7 else {}
    return SamplingParams(
        n=rng.choice([1, 1, 1, 3]),
        temperature=rng.choice([0.0, 0.0, 0.7]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(2**32),
        max_tokens=rng.randint(1, 40),
        min_tokens=0,
        ignore_eos=rng.random() < 0.5,
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 0.4]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.2]),
        logit_bias=bias,
        stop_token_ids=[rng.choice([*repeated, rng.randrange(vocab_size)])] if rng.random() < 0.3 else [],
        logprobs=rng.choice([None, 0, 3]),
    )


def golden_requests(folder: Path, n: int) -> list[EngineRequest]:
    golden, rng = load_golden(folder), random.Random(SEED)
    requests = []
    for i in range(n):
        whole = rng.choice(golden.prompts)
        prompt = whole[: rng.randint(1, min(len(whole), 64))]
        prompt = prompt + [rng.randrange(golden.vocab_size) for _ in range(rng.choice([0, 1, 9]))]
        params = parameters(rng, golden.vocab_size, [7, 8, 9])
        if rng.random() < 0.3:
            params = replace(params, min_tokens=min(6, params.max_tokens or 6))
        bad_words = ((7, 8), (9,)) if rng.random() < 0.2 else ()
        requests.append(
            EngineRequest(
                request_id=f"{i}",
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=(5,),
                arrival_s=0.0,
                deadline_s=1e9,
                client_id=rng.choice("xyz"),
                bad_word_ids=bad_words,
            )
        )
    return requests


def with_predictions(requests: Sequence[EngineRequest], want: Completions) -> list[EngineRequest]:
    """Return the requests with predictions: their completions with a few tokens changed, cut and added."""
    rng, predicted = random.Random(SEED), []
    for request in requests:
        ids = [*want[request.request_id, 0].ids]
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(ids) + 1)
            ids[at : at + rng.randrange(2)] = [rng.randrange(50) for _ in range(rng.randrange(3))]
        predicted.append(replace(request, prediction_token_ids=ids))
    return predicted


SETTINGS = {
    "together": Setting(),
    "alone": Setting(n_open=1, limits={"enable_prefix_caching": False}),
    "preempted": Setting(n_cells=320, limits={"max_num_seqs": 12}),
    "canceled": Setting(n_cells=640, cancels=True, limits={"max_num_seqs": 8, "max_num_batched_tokens": 24}),
    "two streams": Setting(n_cells=1024, n_open=8, limits={"n_streams": 2}, context={"n_streams": 2}),
}


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    return golden_requests(FOLDER, 400)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(FOLDER, "float32", load_golden().vocab_size)


@pytest.fixture(scope="module")
def without(model: Model, requests: list[EngineRequest]) -> Completions:
    return run(model, requests, Setting())[0]


@pytest.mark.parametrize("name", [*SETTINGS])
def test_scripted_drafts_change_nothing(
    model: Model, requests: list[EngineRequest], without: Completions, name: str
) -> None:
    speculator = scripted(model.vocab_size)(without)
    got, n_preempted = run(model, requests, SETTINGS[name], speculator)
    compare(without, got)
    print(
        f"{name}: {speculator.n_accepted} accepted, {speculator.n_rejected} rejected, {n_preempted} preempted"
    )
    assert min(speculator.n_accepted, speculator.n_rejected) > 100
    assert n_preempted > 0 or name != "preempted"


@pytest.mark.parametrize("make", [ngram, suffix], ids=["ngram", "suffix"])
def test_proposed_drafts_change_nothing(
    model: Model, requests: list[EngineRequest], without: Completions, make: MakeSpeculator
) -> None:
    for setting in (Setting(n_open=4), SETTINGS["canceled"]):
        speculator = make(without)
        compare(without, run(model, requests, setting, speculator)[0])
        print(f"{speculator.n_accepted} accepted, {speculator.n_rejected} rejected")
        assert min(speculator.n_accepted, speculator.n_rejected) > 50


def test_predictions_change_nothing(
    model: Model, requests: list[EngineRequest], without: Completions
) -> None:
    speculator = suffix(without)
    got, _ = run(model, with_predictions(requests, without), Setting(n_open=2), speculator)
    compare(without, got)
    print(f"{speculator.n_accepted} accepted, {speculator.n_rejected} rejected")
    assert speculator.n_accepted > speculator.n_rejected > 50


@pytest.mark.parametrize(
    ("folder", "context"),
    [
        ("mistral-bf16", {}),
        ("qwen3_moe_bf16", {}),
        ("llama3-rope-bf16", {"n_ranks": 2, "n_threads": 2}),
        ("qwen2-tied-bf16", {"kv_dtype": "int8"}),
        ("qwen3_5_bf16", {"n_states_kept": 8}),
        ("qwen3_next_bf16", {"n_states_kept": 3, "n_threads": 2}),
        ("lfm2_bf16", {"n_states_kept": 8}),
        ("lfm2_moe_bf16", {"n_states_kept": 3, "n_threads": 2}),
        ("gpt_oss_mxfp4", {"n_threads": 2}),
        ("gemma4_bf16", {"n_threads": 2}),
        ("gemma4_moe_bf16", {"kv_dtype": "int8"}),
    ],
)
def test_windows_experts_ranks_int8_cells_and_recurrent_layers(folder: str, context: dict[str, Any]) -> None:
    requests = golden_requests(GOLDENS / folder, 40)
    model = Model(GOLDENS / folder, "bfloat16", load_golden(GOLDENS / folder).vocab_size)
    n_kept = context.get("n_states_kept", 0)
    limits = {"state_bytes": int(n_kept > 0), "n_states_kept": n_kept}
    want, _ = run(model, requests, Setting(context=context, limits=limits))
    speculator = scripted(model.vocab_size)(want)
    drafted = Setting(n_cells=1024, context=context, limits=limits)
    compare(want, run(model, requests, drafted, speculator)[0])
    print(f"{speculator.n_accepted} accepted, {speculator.n_rejected} rejected")
    assert min(speculator.n_accepted, speculator.n_rejected) > 20


@pytest.fixture(scope="module")
def smollm2() -> Model:
    assets = load_model_assets(load_config({"model": "smollm2"}))
    info = assets.info
    return Model(
        Path(info.path), "auto", info.vocab_size, assets.grammar_compiler(), tuple(info.eos_token_ids)
    )


def smollm2_requests(model: Model) -> list[EngineRequest]:
    """Return chats, of which two thirds have a grammar."""
    assert model.compiler is not None
    rng = random.Random(SEED)
    encode = load_model_assets(load_config({"model": "smollm2"})).tokenizer.encode
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [
        "Repeat: one two three, one two three, one two three.",
        "Make up a record as JSON.",
        "Count to ten.",
    ]
    specs = [
        None,
        None,
        Spec(json=schema(1)),
        Spec(json=schema(4)),
        Spec(regex=r"(ab|ba){4,12}"),
        Spec(choice=["red", "green", "red wine"]),
    ]
    requests = []
    for i in range(72):
        params = parameters(rng, model.vocab_size, [])
        params = replace(params, n=rng.choice([1, 1, 2]))
        if (spec := specs[i % len(specs)]) is not None:
            params = replace(params, ignore_eos=False, structured_outputs=spec)
        requests.append(
            EngineRequest(
                request_id=f"{i}",
                prompt_token_ids=encode(text.format(rng.choice(prompts)), False),
                params=params,
                eos_token_ids=model.eos_token_ids,
                arrival_s=0.0,
                deadline_s=1e9,
            )
        )
    return requests


@pytest.mark.long
def test_drafts_change_nothing_on_smollm2_with_grammars(smollm2: Model) -> None:
    requests = smollm2_requests(smollm2)
    want, _ = run(smollm2, requests, Setting())
    for make in (scripted(smollm2.vocab_size), suffix):
        speculator = make(want)
        compare(want, run(smollm2, requests, Setting(n_open=6), speculator)[0])
        print(f"{speculator.n_accepted} accepted, {speculator.n_rejected} rejected")
        assert min(speculator.n_accepted, speculator.n_rejected) > 10
