"""Models with recurrent layers: a request has the same bits whatever happens around it.

A prefix is shared where its recurrent state is kept. Speculation is tested in test_speculation.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden import load_golden
from invariance import ALONE, SEED, SETTINGS, Model, run
from llaisys import LLM, SamplingParams
from llaisys.config import Config, SpeculativeConfig
from llaisys.engine import memory, state_stops
from llaisys.engine.host import Cpus
from llaisys.engine.memory import EngineSizing, size_engine
from llaisys.engine.worker import inspect_model
from llaisys.errors import RejectedError, UnsupportedError
from runner import LOGITS, Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FOLDERS = ["qwen3_5_bf16", "qwen3_5_moe_bf16", "qwen3_next_bf16", "lfm2_bf16", "lfm2_moe_bf16"]
NAMES = ["chunked without cache", "preempted without cache", "two KV streams"]
# Settings with the prefix cache, and the number of states that it keeps.
CACHED = {"chunked": 64, "preempted": 2, "prefixes evicted": 5, "two KV streams": 16, "small batches": 1}
MIB = 2**20


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(load_golden(GOLDENS / name), GOLDENS / name, 24)
    uncached = {"enable_prefix_caching": False, "state_bytes": 1}
    alone, _ = run(model, replace(ALONE, n_threads=1, limits=ALONE.limits | uncached))
    preempted = 0
    for setting in NAMES:
        limits = SETTINGS[setting].limits | uncached
        cells = model.max_len if "preempted" in setting else SETTINGS[setting].n_cells
        answers, stats = run(model, replace(SETTINGS[setting], n_cells=cells, n_threads=1, limits=limits))
        wrong = [key for key, want in alone.items() if answers.get(key) != want]
        assert answers.keys() == alone.keys()
        assert not wrong, f"{setting}, seed {SEED}: {len(wrong)} choices differ, the first is {wrong[0]}"
        assert stats.prefix_hit_tokens == 0
        preempted += stats.num_preempted
    assert preempted > 0
    # Short prompts: stops closer together than a real prompt needs them.
    monkeypatch.setattr(state_stops, "TAIL_TOKENS", 3)
    monkeypatch.setattr(state_stops, "SAVED_TOKENS_MIN", 8)
    monkeypatch.setattr(state_stops, "SPACING_TOKENS", 16)
    preempted = evicted = 0
    for setting, n_kept in CACHED.items():
        limits = SETTINGS[setting].limits | {"state_bytes": 1, "n_states_kept": n_kept}
        cells = model.max_len if "preempted" in setting else SETTINGS[setting].n_cells
        answers, stats = run(model, replace(SETTINGS[setting], n_cells=cells, n_threads=1, limits=limits))
        wrong = [key for key, want in alone.items() if answers.get(key) != want]
        assert answers.keys() == alone.keys()
        assert not wrong, f"{setting}, seed {SEED}: {len(wrong)} choices differ, the first is {wrong[0]}"
        assert stats.prefix_hit_tokens > 0
        assert 0 < stats.recurrent_states_cached <= stats.recurrent_states_max == n_kept
        preempted, evicted = preempted + stats.num_preempted, evicted + stats.num_evicted_cells
    assert min(preempted, evicted) > 0


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", FOLDERS)
def test_chunks_have_the_same_bits_in_each_format(name: str, dtype: str) -> None:
    golden = load_golden(GOLDENS / name)
    prompt = golden.prompts[2]
    with Runner(GOLDENS / name, dtype=dtype, n_batch=32) as runner:
        whole, _ = runner.forward(prompt)
        sequence, parts = runner.context.seq_acquire(), []
        for start in range(0, len(prompt), 7):
            output = runner.extend(sequence, prompt[start : start + 7], start, LOGITS)
            assert output.logits is not None
            parts.append(output.logits)
        assert np.array_equal(np.concatenate(parts), whole)
        # Random weights lose more than trained ones: this only shows that each matrix has its own rows.
        want = golden.logits[2]
        error = np.abs(whole[np.load(GOLDENS / name / "golden.npz")["rows_2"]] - want).mean()
        assert error < {"auto": 0.1, "int8": 0.3, "int4": 1.0}[dtype] * np.abs(want).mean()


def test_several_choices_have_the_ids_of_single_ones() -> None:
    golden = load_golden(GOLDENS / FOLDERS[0])
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in golden.prompts]
    params = SamplingParams(n=3, temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(GOLDENS / FOLDERS[0]), dtype="float32", num_kv_cells=2048) as llm:
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
    for output, second, want in zip(outputs, again, golden.greedy, strict=True):
        assert [choice.token_ids for choice in output.outputs] == [want] * 3
        assert [choice.token_ids for choice in second.outputs] == [want] * 3


@pytest.mark.parametrize("name", FOLDERS)
def test_a_second_turn_computes_only_the_new_tokens(name: str) -> None:
    golden = load_golden(GOLDENS / name)
    first = golden.prompts[2] * 2
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5)

    def ask(llm: LLM, prompt: list[int]) -> tuple[int, Any, Any]:
        prompts: list[Any] = [{"prompt_token_ids": prompt}]
        (output,) = llm.generate(prompts, params)
        return output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs

    settings: dict[str, Any] = {"num_kv_cells": 2048, "max_num_batched_tokens": 128}
    with LLM(str(GOLDENS / name), **settings) as llm:
        n_cached, ids, _ = ask(llm, first)
        assert n_cached == 0
        turn = [*first, *ids, *golden.prompts[0]]
        n_cached, *second = ask(llm, turn)
        assert n_cached == len(first) + len(ids) - 1, "the last token was not computed"
        # A template may render the end of a prompt in another way: its state shortly before the end is kept.
        edited = [*first[:-3], 7, *golden.prompts[0]]
        n_edited, *third = ask(llm, edited)
        assert n_edited == len(first) - state_stops.TAIL_TOKENS
    with LLM(str(GOLDENS / name), enable_prefix_caching=False, **settings) as llm:
        assert ask(llm, turn) == (0, *second)
        assert ask(llm, edited) == (0, *third)


def test_a_prefix_that_two_requests_had_is_computed_once_more() -> None:
    """The second request finds the cells of the common part, but no state after them, and keeps one there."""
    golden = load_golden(GOLDENS / FOLDERS[0])
    common = (golden.prompts[2] * 3)[:150]
    with LLM(str(GOLDENS / FOLDERS[0]), num_kv_cells=2048) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        cached = []
        for question in (3, 4, 5):
            prompts: list[Any] = [{"prompt_token_ids": [*common, *[question] * 30]}]
            cached.append(llm.generate(prompts, params)[0].num_cached_tokens)
    assert cached == [0, 0, 150]


def sized(memory_bytes: int, **settings: Any) -> EngineSizing:
    return size_engine(Config(**settings), inspect_model(GOLDENS / FOLDERS[0]), memory_bytes, Cpus(2))


def test_states_count_in_the_size_of_an_engine() -> None:
    info = inspect_model(GOLDENS / FOLDERS[0])
    # Four recurrent layers: 3 inputs of 128 channels, and four matrices of 16 x 16, in float32. Two layers
    # with attention: K and V of one head of 32.
    assert info.state_bytes == 4 * 4 * (3 * 128 + 4 * 16 * 16)
    assert info.kv_bytes_per_cell["float32"] == 2 * 2 * 32 * 4
    made = sized(1024 * MIB, num_kv_cells=1024)
    assert made.limits.state_bytes == info.state_bytes
    assert made.limits.enable_prefix_caching
    assert made.limits.max_num_seqs == 64
    assert made.limits.n_states_kept == made.settings.n_states_kept == 4 * 64
    assert "recurrent states of 64 requests and 256 cached prefixes: 8.2 MiB" in made.summary
    # Without the prefix cache, no states are kept.
    made = sized(1024 * MIB, num_kv_cells=1024, enable_prefix_caching=False)
    assert made.limits.n_states_kept == 0
    assert "recurrent states of 64 requests, without a prefix cache: 2.8 MiB" in made.summary
    # With little memory fewer requests run, unless their number is configured; then the model does not fit.
    weights = info.packed_bytes["auto"]
    made = sized(weights + MIB, num_kv_cells=64, max_num_batched_tokens=32, screen_lm_head=False)
    assert 1 <= made.limits.max_num_seqs < 8
    assert 1 <= made.limits.n_states_kept < 8
    # A state that is too large to keep one turns the prefix cache off.
    large = replace(info, state_bytes=200 * MIB)
    assert not size_engine(Config(num_kv_cells=64), large, 1024 * MIB, Cpus(2)).limits.enable_prefix_caching
    with pytest.raises(RejectedError, match="does not fit"):
        sized(weights + MIB, num_kv_cells=64, max_num_seqs=64, screen_lm_head=False)


def test_activations_of_recurrent_layers_count_in_the_workspace() -> None:
    info = inspect_model(GOLDENS / FOLDERS[0])
    # Twice the 128 channels, values and value heads; a gate for each number of the attention.
    width = 2 * (128 + 64 + 4) + info.n_heads * info.d_head
    assert info.recurrent_width == width
    settings = Config(max_num_batched_tokens=1000)
    row_bytes = memory._workspace_bytes(settings, info)
    assert row_bytes - memory._workspace_bytes(settings, replace(info, recurrent_width=0)) == 4000 * width
    # Of each row of a step with drafts, up to 16, the inputs of four recurrent layers are recorded.
    assert info.journal_width == 4 * (128 + 2 * 4)
    drafts = Config(
        max_num_batched_tokens=1000,
        max_num_seqs=10,
        speculative_config=SpeculativeConfig(method="suffix", num_speculative_tokens=4),
    )
    row_bytes = memory._workspace_bytes(drafts, info)
    none = memory._workspace_bytes(drafts, replace(info, journal_width=0))
    assert row_bytes - none == 4 * 16 * info.journal_width


def test_a_draft_model_with_recurrent_layers_is_refused_by_name() -> None:
    info = inspect_model(GOLDENS / FOLDERS[1])
    draft = Config(speculative_config=SpeculativeConfig(method="draft_model", model="draft"))
    attention = inspect_model(GOLDENS / "qwen3_moe_bf16")
    with pytest.raises(UnsupportedError, match="Qwen3_5MoeForCausalLM"):
        size_engine(draft, attention, 1024 * MIB, Cpus(2), draft=info)
