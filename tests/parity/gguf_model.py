"""GGUF files of random small models, as llama.cpp's converter writes them, with all tensors in F32.

Names and keys: the GGUF specification and llama.cpp's `gguf-py/gguf/constants.py`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parity.families import FAMILIES
from parity.numpy_forward import Shape, rope_amplitude, rope_frequencies, stretched_theta
from parity.random_model import Weights, fuse, neighbors

Value = bool | int | float | str | list[str] | list[int] | list[bool]

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, family: str, shape: Shape, weights: Weights, **more: Value) -> Path:
    """Write a file that the core can open, with `more` keys of the architecture; return its path."""
    architecture = FAMILIES[family].gguf
    assert architecture is not None
    keys: dict[str, Value] = {"general.architecture": architecture}
    keys |= {f"{architecture}.{key}": value for key, value in {**_keys(family, shape), **more}.items()}
    tokens = [f"t{i}" for i in range(shape.vocab_size)]
    keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens}
    keys |= {"tokenizer.ggml.merges": ["t0 t1"], "tokenizer.ggml.eos_token_id": 1}
    path.write_bytes(_file(keys, gguf_tensors(family, shape, weights)))
    return path


def _keys(family: str, shape: Shape) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "block_count": shape.n_layers,
        "context_length": shape.max_positions,
        "embedding_length": shape.d_model,
        "feed_forward_length": 3 * shape.d_ff if family == "qwen3_moe" else shape.d_ff,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.key_length": shape.d_head,
        "attention.value_length": shape.d_head,
        "attention.layer_norm_rms_epsilon": shape.rms_eps,
        "rope.freq_base": shape.rope_theta,
        "rope.dimension_count": shape.rope_width,
        "vocab_size": shape.vocab_size,
    }
    rope = shape.rope
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        for name in ("fast", "slow"):
            if f"beta_{name}" in rope:
                keys[f"rope.scaling.yarn_beta_{name}"] = rope[f"beta_{name}"]
    if rope.get("rope_type") == "dynamic":
        keys["rope.freq_base"] = stretched_theta(shape)
    if family == "granitemoehybrid":
        keys |= {"attention.head_count_kv": [shape.n_kv_heads] * shape.n_layers, "expert_count": 0}
        keys |= {"rope.scaling.finetuned": True, "ssm.conv_kernel": 4, "ssm.state_size": 128}
    if "original_max_position_embeddings" in rope:
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope.get("rope_type") == "longrope":
        keys["rope.scaling.attn_factor"] = rope_amplitude(shape)
    if shape.window is not None:
        keys["attention.sliding_window"] = shape.window
        if FAMILIES[family].unscaled_local_rope:
            keys["attention.sliding_window_pattern"] = list(shape.windowed)
    if shape.query_scaling is not None:
        keys["attention.temperature_scale"] = shape.query_scaling[0]
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    if FAMILIES[family].multipliers and shape.score_scale is not None:
        keys |= {"embedding_scale": shape.embed_scale, "residual_scale": shape.residual_scale}
        keys |= {"logit_scale": 1 / shape.logit_scale, "attention.scale": shape.score_scale}
    if shape.attn_soft_cap is not None:
        keys["attn_logit_softcapping"] = shape.attn_soft_cap
    if shape.logit_soft_cap is not None:
        keys["final_logit_softcapping"] = shape.logit_soft_cap
    if shape.experts is not None:
        keys |= {"expert_count": shape.experts.n, "expert_used_count": shape.experts.n_used}
        if not shape.experts.normalize:
            keys["expert_weights_norm"] = False
        if family == "qwen3_moe":
            keys["expert_feed_forward_length"] = shape.d_ff
    return keys


def gguf_tensors(family: str, shape: Shape, weights: Weights) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a file by name."""
    if FAMILIES[family].gguf_neighbors:
        # The rows of a rotary pair are rows 2i and 2i + 1.
        weights = neighbors(shape, weights)
    stored = fuse(family, shape, weights) if FAMILIES[family].gguf_fused else dict(weights)
    tensors: dict[str, NDArray[np.float32]] = {}
    for i in range(shape.n_layers):
        if shape.experts is not None:
            for part in ("gate", "up", "down"):
                experts = [
                    f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight" for e in range(shape.experts.n)
                ]
                tensors[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack([stored.pop(name) for name in experts])
    for name, value in stored.items():
        stem, kind = name.rsplit(".", 1)
        if stem in _TOP:
            tensors[f"{_TOP[stem]}.{kind}"] = value
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        theirs = _NAMES[part]
        if family == "seed_oss" and theirs == "ffn_norm":
            theirs = "post_attention_norm"
        tensors[f"blk.{layer}.{theirs}.{kind}"] = value
    if shape.rope.get("rope_type") == "llama3":
        plain = rope_frequencies(_without_scaling(shape))
        tensors["rope_freqs.weight"] = (plain / rope_frequencies(shape)).astype(np.float32)
    if shape.rope.get("rope_type") == "longrope":
        for name in ("short", "long"):
            factors = np.array(shape.rope[f"{name}_factor"], np.float32)
            tensors[f"rope_factors_{name}.weight"] = factors
    return tensors


def _without_scaling(shape: Shape) -> Shape:
    return Shape(**{**shape.__dict__, "rope": {}})


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [bool(), *_]:
            return struct.pack("<IIQ", 9, 7, len(value)) + struct.pack(f"<{len(value)}?", *value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(str(v)) for v in value)
        case _:
            return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def _file(keys: dict[str, Value], tensors: dict[str, NDArray[np.float32]]) -> bytes:
    """Return the bytes of a file: version 3, data aligned to 32 bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_string(key) + _value(value) for key, value in keys.items())
    data = b""
    for name, tensor in tensors.items():
        head += _string(name) + struct.pack("<I", tensor.ndim)
        head += struct.pack(f"<{tensor.ndim}Q", *reversed(tensor.shape)) + struct.pack("<IQ", 0, len(data))
        raw = tensor.astype("<f4").tobytes()
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data
