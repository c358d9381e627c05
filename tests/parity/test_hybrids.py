"""Models with recurrent layers: a request has the same bits whatever happens around it.

Their state is that of the last position, so prefixes are not shared: the prefix cache, sessions and
speculation are off or refused by name.
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
from llaisys.engine.host import Cpus
from llaisys.engine.memory import EngineSizing, size_engine
from llaisys.engine.worker import inspect_model
from llaisys.errors import RejectedError, UnsupportedError
from runner import LOGITS, Runner

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FOLDERS = ["qwen3_5_bf16", "qwen3_5_moe_bf16", "qwen3_next_bf16"]
NAMES = ["chunked without cache", "preempted without cache", "two KV streams"]
MIB = 2**20


@pytest.mark.parametrize("name", FOLDERS)
def test_the_same_bits(name: str) -> None:
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
        assert second.num_cached_tokens == 0


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
    assert not made.limits.enable_prefix_caching
    assert made.limits.max_num_seqs == 64
    assert "recurrent states of 64 requests: 2.8 MiB; no prefix caching" in made.summary
    # With little memory fewer requests run, unless their number is configured; then the model does not fit.
    weights = info.packed_bytes["auto"]
    made = sized(weights + MIB, num_kv_cells=64, max_num_batched_tokens=32, screen_lm_head=False)
    assert 1 <= made.limits.max_num_seqs < 8
    with pytest.raises(RejectedError, match="does not fit"):
        sized(weights + MIB, num_kv_cells=64, max_num_seqs=64, screen_lm_head=False)


def test_speculation_and_sessions_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    info = inspect_model(GOLDENS / FOLDERS[1])
    config = Config(speculative_config=SpeculativeConfig(method="suffix"))
    with pytest.raises(UnsupportedError, match="Qwen3_5MoeForCausalLM") as refused:
        size_engine(config, info, 1024 * MIB, Cpus(2))
    assert refused.value.param == "speculative_config"
    draft = Config(speculative_config=SpeculativeConfig(method="draft_model", model="draft"))
    attention = inspect_model(GOLDENS / "qwen3_moe_bf16")
    with pytest.raises(UnsupportedError, match="Qwen3_5MoeForCausalLM"):
        size_engine(draft, attention, 1024 * MIB, Cpus(2), draft=info)
    with LLM(str(GOLDENS / FOLDERS[1]), num_kv_cells=256) as llm, caplog.at_level("ERROR"):
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], session_id="chat")
    assert output.outputs[0].finish_reason == "error"
    assert "sessions need the prefix cache, which is off for models with recurrent layers" in caplog.text
