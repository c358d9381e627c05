"""Checks of optional features of an engine, and what they need. Pure.

Each function raises RejectedError or UnsupportedError naming the setting.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from llaisys.config import EngineConfig, KvEventsConfig, SpeculativeConfig
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo

_FLOAT_BYTES = 4


def kv_events_of(config: EngineConfig, info: ModelInfo) -> KvEventsConfig | None:
    """Return the settings of KV events if they are to be published."""
    kv_events = config.kv_events_config
    if kv_events is None or not kv_events.publishes:
        return None
    if not config.enable_prefix_caching:
        raise RejectedError(
            "kv_events_config publishes the prefix cache, and enable_prefix_caching is off; turn it on",
            param="kv_events_config",
        )
    if info.state_bytes:
        raise UnsupportedError(
            f"kv_events_config publishes cached blocks, and {info.architecture} can continue only after some "
            "of them, where a recurrent state is kept; leave it out",
            param="kv_events_config",
        )
    if find_spec("zmq") is None:
        raise UnsupportedError(
            "kv_events_config needs pyzmq; install it: pip install 'llaisys[kv-events]'",
            param="kv_events_config",
        )
    return kv_events


def check_disk_tier(config: EngineConfig, info: ModelInfo) -> None:
    """Check the disk tier of the prefix cache."""
    if config.prefix_cache_dir is None:
        return
    if not config.enable_prefix_caching:
        raise RejectedError(
            "prefix_cache_dir keeps the prefix cache on disk, and enable_prefix_caching is off; turn it on",
            param="prefix_cache_dir",
        )
    if info.state_bytes:
        raise UnsupportedError(
            f"prefix_cache_dir keeps K and V of blocks, and {info.architecture} needs a recurrent state to "
            "continue after them; leave it out",
            param="prefix_cache_dir",
        )


def speculation_of(
    config: EngineConfig, draft: ModelInfo | None, *, on_gpu: bool
) -> SpeculativeConfig | None:
    """Return the settings of speculative decoding; None: it is off.

    Raises UnsupportedError if drafts of a configured method cannot be verified or computed.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.method == "none":
        return None
    if speculation.method == "auto":
        return None if on_gpu else replace(speculation, method="suffix")
    if on_gpu:
        raise UnsupportedError(
            "speculative decoding runs on the CPU only; set device cpu", param="speculative_config"
        )
    if draft is not None and draft.state_bytes:
        raise UnsupportedError(
            f"the draft model is a {draft.architecture}, whose recurrent layers have no state to return to "
            "after a rejected draft; choose another draft model",
            param="speculative_config",
        )
    return speculation


def check_draft(draft: ModelInfo, info: ModelInfo) -> None:
    """Check that a draft model has the tokenizer of the model."""
    if draft.vocab_size != info.vocab_size:
        raise RejectedError(
            f"the draft model has a vocabulary of {draft.vocab_size}, the model one of {info.vocab_size}; "
            "choose a draft model with the same tokenizer",
            param="speculative_config",
        )


def lora_bytes(config: EngineConfig, info: ModelInfo, *, on_gpu: bool) -> int:
    """Check the settings of LoRA, and return the bytes of as many adapters as may be loaded; 0: it is off.

    The bytes are those of adapters of the highest rank in float32, in all projections.
    """
    if not config.enable_lora:
        return 0
    if on_gpu:
        raise UnsupportedError(
            "enable_lora is not supported on a GPU; set device cpu, or leave it out", param="enable_lora"
        )
    if config.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"enable_lora is not supported with tensor_parallel_size {config.tensor_parallel_size}; set 1",
            param="enable_lora",
        )
    q, kv = info.n_heads * info.d_head, info.n_kv_heads * info.d_head
    attention = 4 * info.d_model + 2 * q + 2 * kv
    feed_forward = 3 * (info.d_model + info.d_ff)
    ranks = config.max_loras * config.max_lora_rank
    adapters = ranks * info.n_layers * (attention + feed_forward)
    # The stacked ranks of four modules, and the outputs of gate and up.
    row = 4 * config.max_lora_rank + 2 * info.d_ff
    return _FLOAT_BYTES * (adapters + config.max_num_batched_tokens * row)
