"""Number of KV cells and context length from the available memory, and rejected settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llaisys.config import Config, KvEventsConfig, SpeculativeConfig
from llaisys.engine import features
from llaisys.engine.host import Cpus
from llaisys.engine.memory import EngineSizing, GpuSettings, size_encoder, size_engine
from llaisys.engine.worker import inspect_model
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo

MIB = 2**20
# Workspace of the fake model, float32: 512 rows of ten dimensions of 1, and 64 rows of 300 logits.
WORKSPACE = 4 * (512 * 10 + 64 * 300)


@pytest.fixture(autouse=True)
def _fake(fake_core: None) -> None:
    """`inspect_model` returns the fake model: 1,000 parameters, 4, 8 or 10 bytes per cell, 128 positions."""


def sized(memory_bytes: int = 100 * MIB, **settings: Any) -> EngineSizing:
    return size_engine(Config(**settings), inspect_model(Path("fake")), memory_bytes, Cpus(2))


def model_of(auto: int, float32: int = 0, bfloat16: int = 0) -> ModelInfo:
    """Return the fake model with this many MiB of packed weights."""
    mib = {"auto": auto, "float32": float32, "bfloat16": bfloat16, "int8": 20, "int4": 10}
    packed_bytes = {dtype: n * MIB for dtype, n in mib.items()}
    return replace(inspect_model(Path("fake")), weight_bytes=MIB, packed_bytes=packed_bytes)


def test_cells_are_bounded_by_what_the_requests_can_use() -> None:
    made = sized()
    assert (made.limits.n_cells, made.limits.max_model_len) == (64 * 128, 128)
    assert "64 requests of 128 tokens" in made.summary
    assert made.settings.n_threads == 2
    assert made.settings.kv_dtype == "bfloat16"


@pytest.mark.parametrize("name", ["int8", "int8_per_token_head"])
def test_int8_cells_under_our_name_and_that_of_vllm(name: str) -> None:
    made = sized(kv_cache_memory_bytes=4 * 333, kv_cache_dtype=name)
    assert made.settings.kv_dtype == "int8"
    assert made.limits.n_cells == 133  # cells of 10 bytes
    assert "133 cells x 10 B (int8)" in made.summary


def test_the_kv_cache_uses_a_fifth_of_the_remaining_memory() -> None:
    made = sized(memory_bytes=WORKSPACE + 4000 + 5 * 1000 * 4)
    assert made.limits.n_cells == 992
    assert "a fifth" in made.summary
    assert sized(memory_bytes=WORKSPACE + 4000 + 5 * 1000 * 8, dtype="float32").limits.n_cells == 992
    assert sized(memory_bytes=WORKSPACE + 2000 + 5 * 1000 * 4, dtype="bfloat16").limits.n_cells == 992


def test_too_little_memory_shortens_the_context_and_the_summary_reports_it() -> None:
    made = sized(memory_bytes=WORKSPACE + 4000 + 5 * 100 * 4)
    assert (made.limits.n_cells, made.limits.max_model_len) == (96, 96)
    assert made.settings.max_model_len == 96
    assert "cut from 128" in made.summary
    assert sized(memory_bytes=WORKSPACE + 4000 + 5 * 20 * 4).limits.n_cells == 20


def test_settings_override_the_computed_sizes() -> None:
    assert sized(num_kv_cells=100_000).limits.n_cells == 100_000
    assert sized(num_kv_cells=50).limits.max_model_len == 50
    assert sized(kv_cache_memory_bytes=4 * 333).limits.n_cells == 333
    assert sized(kv_cache_memory_bytes=4 * 333, kv_cache_dtype="float32").limits.n_cells == 166
    assert sized(max_model_len=40).limits.max_model_len == 40
    assert sized(num_threads=7).settings.n_threads == 7


def test_threads_are_pinned_if_there_are_enough_cpus() -> None:
    def cpu_ids(num_threads: int | None) -> tuple[int, ...]:
        config, info = Config(num_threads=num_threads), inspect_model(Path("fake"))
        return size_engine(config, info, 200 * MIB, Cpus(2, (4, 6))).settings.cpu_ids

    assert [cpu_ids(n) for n in (None, 1, 2, 3)] == [(4, 6), (4, 6), (4, 6), ()]


@pytest.mark.parametrize(
    ("settings", "memory_bytes", "param"),
    [
        ({"kv_cache_memory_bytes": 3}, 100 * MIB, "kv_cache_memory_bytes"),
        ({"num_kv_cells": 1, "num_kv_streams": 2}, 100 * MIB, "num_kv_cells"),
        ({}, 4000, "model"),
        ({"num_kv_cells": 30 * MIB}, 100 * MIB, "kv_cache_memory_bytes"),
        ({"max_model_len": 129}, 100 * MIB, "max_model_len"),
    ],
)
def test_a_setting_that_cannot_be_satisfied_is_named(
    settings: dict[str, Any], memory_bytes: int, param: str
) -> None:
    with pytest.raises(RejectedError) as caught:
        sized(memory_bytes, **settings)
    assert caught.value.param == param


def test_a_larger_model_leaves_fewer_cells() -> None:
    info = replace(model_of(50), kv_bytes_per_cell={"bfloat16": MIB})
    assert size_engine(Config(), info, 100 * MIB + WORKSPACE, Cpus(1)).limits.n_cells == 10


def test_a_model_larger_than_the_memory_is_rejected_with_its_sizes() -> None:
    info = replace(model_of(90), d_ff=4096, vocab_size=16384)
    config = Config(kv_cache_memory_bytes=8 * MIB)
    # 512 rows of about 3 * 4096 floats, and 64 rows of logits.
    assert size_engine(config, info, 200 * MIB, Cpus(1)).limits.n_cells == 2 * MIB
    words = (
        r"weights 90\.0 MiB \+ KV cache 8\.0 MiB \+ workspace 28\.0 MiB = 126\.0 MiB, "
        r"available: 120\.0 MiB; set a smaller KV cache"
    )
    with pytest.raises(RejectedError, match=words):
        size_engine(config, info, 120 * MIB, Cpus(1))
    with pytest.raises(RejectedError, match="use a smaller model") as caught:
        size_engine(Config(), info, 110 * MIB, Cpus(1))
    assert caught.value.param == "model"
    assert size_engine(Config(), info, 130 * MIB, Cpus(1)).limits.n_cells * 4 < 12 * MIB / 4


def test_weights_are_counted_at_their_packed_size() -> None:
    info = model_of(auto=30, float32=80, bfloat16=40)
    for mode, n_mib in info.packed_bytes.items():
        config = Config(quantization=mode) if mode.startswith("int") else Config(dtype=mode)
        sized = size_engine(config, info, n_mib + MIB, Cpus(1))
        assert sized.settings.dtype == mode
        assert f"weights: {n_mib // MIB}.0 MiB ({mode})" in sized.summary
        with pytest.raises(RejectedError, match=rf"weights {n_mib // MIB}\.0 MiB"):
            size_engine(config, info, n_mib, Cpus(1))


def test_the_weights_of_pruned_argmax_are_counted_if_it_is_enabled() -> None:
    info = replace(model_of(auto=30), screen_bytes={"auto": 5 * MIB})
    for n_mib, config in [
        (35, Config()),
        (30, Config(screen_lm_head=False)),
        (30, Config(tensor_parallel_size=2)),
    ]:
        sized = size_engine(config, info, 60 * MIB, Cpus(2))
        assert f"weights: {n_mib}.0 MiB" in sized.summary
        assert sized.settings.prune_argmax is (n_mib == 35)


def test_dtype_and_quantization_must_not_contradict_each_other() -> None:
    with pytest.raises(RejectedError, match="dtype float32 and quantization int8 contradict") as caught:
        sized(dtype="float32", quantization="int8")
    assert caught.value.param == "quantization"


def test_the_buffers_between_ranks_are_counted() -> None:
    made = sized(tensor_parallel_size=2, num_threads=6)
    assert (made.settings.n_ranks, made.settings.n_threads) == (2, 6)
    assert made.summary.endswith("split over 2 ranks")
    workspace = 4 * (512 * (4 * 2 + 8) + 64 * (4 + 2) * 300)
    assert sized(memory_bytes=workspace + 4000 + 5 * 1000 * 4, tensor_parallel_size=2).limits.n_cells == 992
    assert "rank" not in sized().summary


def test_on_a_gpu_the_core_sizes_the_kv_cache_unless_configured() -> None:
    gpu = GpuSettings(ordinal=0, memory_share=0.9, synchronous=False, overlap=True)

    def on_gpu(**settings: Any) -> EngineSizing:
        # Host memory is 0: weights and cells are on the GPU.
        return size_engine(Config(**settings), inspect_model(Path("fake")), 0, Cpus(2), gpu=gpu)

    made = on_gpu(num_kv_streams=2)
    assert (made.settings.n_cells, made.settings.gpu, made.settings.kv_dtype) == (None, gpu, "auto")
    assert made.limits.max_model_len == made.settings.max_model_len == 128
    assert "as many as fit on the GPU" in made.summary
    assert on_gpu(num_kv_cells=50).settings.n_cells == 50
    assert on_gpu(kv_cache_dtype="int8_per_token_head").settings.kv_dtype == "int8"  # the core rejects it
    few = made.limits.with_cells(60)
    assert (few.n_cells, few.max_model_len) == (60, 30)
    assert made.limits.with_cells(10_000).max_model_len == 128


def test_speculation_is_the_default_on_the_cpu_and_rejected_on_a_gpu() -> None:
    speculative = SpeculativeConfig(method="suffix")
    assert sized().speculation == speculative
    assert sized().limits.speculates
    assert sized(speculative_config=None).speculation is None
    assert sized(speculative_config=SpeculativeConfig(method="none")).speculation is None
    few = SpeculativeConfig(method="auto", num_speculative_tokens=2)
    assert sized(speculative_config=few).speculation == replace(speculative, num_speculative_tokens=2)
    config, info = Config(speculative_config=speculative), inspect_model(Path("fake"))
    gpu = GpuSettings(ordinal=0, memory_share=0.9, synchronous=False, overlap=True)
    on_gpu = size_engine(Config(), info, 100 * MIB, Cpus(2), gpu=gpu)
    assert on_gpu.speculation is None
    assert not on_gpu.limits.speculates
    with pytest.raises(UnsupportedError, match="device cpu") as error:
        size_engine(config, info, 100 * MIB, Cpus(2), gpu=gpu)
    assert error.value.param == "speculative_config"


def test_a_disk_tier_needs_the_prefix_cache_and_no_recurrent_layers() -> None:
    folder = Path("somewhere")
    assert sized(prefix_cache_dir=folder).limits.prefix_cache_dir == folder
    with pytest.raises(RejectedError, match="enable_prefix_caching is off") as error:
        sized(prefix_cache_dir=folder, enable_prefix_caching=False)
    assert error.value.param == "prefix_cache_dir"
    recurrent = replace(inspect_model(Path("fake")), state_bytes=4096)
    with pytest.raises(UnsupportedError, match="needs a recurrent state") as unsupported:
        size_engine(Config(prefix_cache_dir=folder), recurrent, 100 * MIB, Cpus(2))
    assert unsupported.value.param == "prefix_cache_dir"
    encoder = replace(inspect_model(Path("fake")), state_bytes=0)
    with pytest.raises(UnsupportedError, match="not supported for an encoder"):
        size_encoder(Config(prefix_cache_dir=folder), encoder, 100 * MIB, Cpus(2))


def test_kv_events_need_the_prefix_cache_and_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    on = KvEventsConfig(enable_kv_cache_events=True)
    assert sized(kv_events_config=on).kv_events == on
    assert sized(kv_events_config=KvEventsConfig()).kv_events is None
    assert sized(kv_events_config=replace(on, publisher="null")).kv_events is None
    with pytest.raises(RejectedError, match="enable_prefix_caching is off") as error:
        sized(kv_events_config=on, enable_prefix_caching=False)
    assert error.value.param == "kv_events_config"
    recurrent = replace(inspect_model(Path("fake")), state_bytes=64)
    with pytest.raises(UnsupportedError, match="where a recurrent state is kept; leave it out"):
        size_engine(Config(kv_events_config=on), recurrent, 100 * MIB, Cpus(2))
    monkeypatch.setattr(features, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'llaisys\[kv-events\]'"):
        sized(kv_events_config=on)


def test_a_draft_model_takes_memory_and_needs_the_same_vocabulary() -> None:
    config = Config(speculative_config=SpeculativeConfig(method="draft_model", model="fake"))
    info = inspect_model(Path("fake"))
    alone = size_engine(Config(), info, WORKSPACE + 4000 + 5 * 1000 * 4, Cpus(2))
    made = size_engine(config, info, WORKSPACE + 4000 + 4000 + 5 * 1000 * 8, Cpus(2), draft=info)
    assert made.draft_settings is not None
    assert made.draft_settings.n_cells == made.limits.n_cells == alone.limits.n_cells
    assert "draft model fake" in made.summary
    assert alone.draft_settings is None
    with pytest.raises(RejectedError, match="same tokenizer") as error:
        size_engine(config, info, 100 * MIB, Cpus(2), draft=replace(info, vocab_size=299))
    assert error.value.param == "speculative_config"
