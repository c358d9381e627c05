"""Random small models of every family, and Hugging Face folders of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from parity.families import FAMILIES, Family
from parity.numpy_forward import Experts, Shape

Weights = Mapping[str, NDArray[np.float32]]


@st.composite
def shapes(draw: st.DrawFn, family: str, gguf: bool = False) -> Shape:
    """Draw odd sizes: only an even `d_head` and whole groups of heads are required. `gguf`: only what a GGUF
    file can express."""
    facts = FAMILIES[family]
    # Five layers have one that is not rotated where a file has no key for it.
    n_layers = draw(st.sampled_from([1, 5]) if facts.unrotated else st.integers(1, 3))
    n_kv_heads = draw(st.integers(1, 3))
    n_heads, d_head = n_kv_heads * draw(st.integers(1, 4)), 2 * draw(st.integers(2, 40))
    d_model, share = draw(st.integers(3, 70)), draw(st.sampled_from(facts.partial))
    scale = st.sampled_from([0.25, 0.5, 1.5])
    cap = st.sampled_from([2.0, 30.0]) if gguf else st.sampled_from([None, 2.0, 30.0])
    window, windowed = draw(_windows(facts, n_layers, gguf))
    theta, rope = draw(st.sampled_from([1e4, 5e5, 1e6])), draw(_ropes(facts, d_rope(d_head, share)))
    every = 4 if gguf else draw(st.integers(1, 4))
    n_experts = draw(st.integers(2, 6))
    biased = {part for _, parts in facts.biases if draw(st.booleans()) for part in parts.split()}
    multiplied = {name: draw(scale) for name in _MULTIPLIERS} if facts.multipliers else {}
    if facts.activation == "gelu_tanh":
        multiplied["embed_scale"] = float(np.float32(np.sqrt(d_model)))
    if facts.scalar:
        multiplied["score_scale"] = d_head**-0.5 if gguf else draw(st.sampled_from([8, 24, 100])) ** -0.5
    return Shape(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=draw(st.integers(1, 90)),
        vocab_size=draw(st.integers(10, 130)),
        rope_theta=theta,
        rms_eps=draw(st.sampled_from([1e-6, 1e-5])),
        qkv_bias=facts.qkv_bias or "qkv" in biased,
        o_bias="o" in biased,
        mlp_bias="mlp" in biased,
        qk_norm=facts.qk_norm,
        tied=draw(st.booleans()),
        rope=rope,
        d_rope=d_rope(d_head, share),
        rotated=tuple((i + 1) % every != 0 for i in range(n_layers)) if facts.unrotated else (),
        query_scaling=(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
        if facts.scaled_queries
        else None,
        local_theta=draw(_local_theta(facts, theta, gguf)),
        window=window,
        windowed=windowed,
        pre_norms=facts.pre_norms,
        post_norms=facts.post_norms,
        activation=facts.activation,
        attn_soft_cap=draw(cap) if "attn" in facts.soft_caps else None,
        logit_soft_cap=draw(cap) if "final" in facts.soft_caps else None,
        experts=Experts(
            n_experts,
            draw(st.integers(1, n_experts)),
            normalize=draw(st.booleans()) if family == "qwen3_moe" else True,
        )
        if facts.experts
        else None,
        **multiplied,
    )


def d_rope(d_head: int, share: float) -> int:
    """Return the rotated width of a head: an even number from 2."""
    return d_head if share == 1.0 else max(2, int(d_head * share) // 2 * 2)


@st.composite
def _local_theta(draw: st.DrawFn, facts: Family, theta: float, gguf: bool) -> float | None:
    if facts.unscaled_local_rope:
        return theta
    if not facts.local_rope:
        return None
    return 1e4 if gguf else draw(st.sampled_from([1e4, 1e3]))


_MULTIPLIERS = ("embed_scale", "residual_scale", "logit_scale", "score_scale")


_GGUF_WINDOWS = ("phi3", "gemma2", "gemma3", "olmo2", "mistral3")


@st.composite
def _windows(
    draw: st.DrawFn, facts: Family, n_layers: int, gguf: bool
) -> tuple[int | None, tuple[bool, ...]]:
    # GGUF files of these families have no key for a window.
    if facts.window == "none" or (gguf and facts.gguf not in _GGUF_WINDOWS):
        return None, ()
    window = draw(st.sampled_from([None, 1, 7, 20, 33]) if facts.window != "pattern" else st.integers(1, 33))
    if facts.window in ("all", "switched"):
        return window, (window is not None,) * n_layers
    if facts.window == "from_layer":
        first = draw(st.integers(0, n_layers))
        return window, tuple(window is not None and i >= first for i in range(n_layers))
    if facts.unscaled_local_rope:
        # A file states which layers have a window.
        return window, tuple(draw(st.booleans()) for _ in range(n_layers))
    every = 2 if facts.gguf == "gemma2" else 6 if gguf else draw(st.integers(1, 3))
    return window, tuple((i + 1) % every != 0 for i in range(n_layers))


@st.composite
def _ropes(draw: st.DrawFn, facts: Family, width: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(facts.ropes))
    original = draw(st.sampled_from([16, 64]))
    factor = draw(st.sampled_from([2.0, 8.0]))
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "dynamic":
        return {"rope_type": kind, "alpha": draw(st.sampled_from([2.0, 50.0]))}
    if kind == "llama3":
        turns = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original,
            **turns,
        }
    if kind == "yarn":
        betas = draw(st.sampled_from([{}, {"beta_fast": 8.0, "beta_slow": 0.5}]))
        if facts.scaled_queries:
            betas = {**betas, "mscale": 1.0, "mscale_all_dim": draw(st.sampled_from([1.0, 0.5]))}
            betas["llama_4_scaling_beta"] = draw(st.sampled_from([0.1, 0.5]))
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original,
            **betas,
        }
    if kind == "longrope":
        numbers = st.floats(1, 8, width=32)
        factors = draw(st.lists(numbers, min_size=width // 2, max_size=width // 2))
        return {
            "rope_type": kind,
            "original_max_position_embeddings": original,
            "short_factor": factors,
            "long_factor": [2 * factor for factor in factors],
        }
    return {}


def random_weights(shape: Shape, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return weights that keep activations near 1, named as in `parity.numpy_forward`."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    w = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, shape.d_model),
        "model.norm.weight": norm(shape.d_model),
    }
    if not shape.tied:
        w["lm_head.weight"] = matrix(shape.vocab_size, shape.d_model)
    q_size, kv_size = shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
    norms = ["input_layernorm", "post_attention_layernorm"] if shape.pre_norms else []
    norms += ["attn_post_norm", "ffn_post_norm"] if shape.post_norms else []
    for i in range(shape.n_layers):
        layer = f"model.layers.{i}."
        for name in norms:
            w[f"{layer}{name}.weight"] = norm(shape.d_model)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            w[f"{layer}self_attn.{name}_proj.weight"] = matrix(size, shape.d_model)
            if shape.qkv_bias:
                w[f"{layer}self_attn.{name}_proj.bias"] = matrix(size, 1)[:, 0] * 0.3
            if shape.qk_norm != "none" and name != "v":
                width = size if shape.qk_norm == "projection" else shape.d_head
                w[f"{layer}self_attn.{name}_norm.weight"] = norm(width)
        w[layer + "self_attn.o_proj.weight"] = matrix(shape.d_model, q_size)
        if shape.o_bias:
            w[layer + "self_attn.o_proj.bias"] = matrix(shape.d_model, 1)[:, 0] * 0.3
        if shape.mlp_bias:
            for name, size in (("gate", shape.d_ff), ("up", shape.d_ff), ("down", shape.d_model)):
                w[f"{layer}mlp.{name}_proj.bias"] = matrix(size, 1)[:, 0] * 0.3
        mlps = ["mlp"]
        if shape.experts is not None:
            mlps = [f"mlp.experts.{e}" for e in range(shape.experts.n)]
            w[layer + "mlp.gate.weight"] = matrix(shape.experts.n, shape.d_model)
        for mlp in mlps:
            w[f"{layer}{mlp}.gate_proj.weight"] = matrix(shape.d_ff, shape.d_model)
            w[f"{layer}{mlp}.up_proj.weight"] = matrix(shape.d_ff, shape.d_model)
            w[f"{layer}{mlp}.down_proj.weight"] = matrix(shape.d_model, shape.d_ff)
    return w


def config_json(family: str, shape: Shape, *, old_spelling: bool = False) -> dict[str, object]:
    """Return `config.json` of a shape, in the new spelling (`rope_parameters`, `dtype`) or the old one."""
    facts = FAMILIES[family]
    config: dict[str, object] = {
        "architectures": [facts.architecture],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.d_head,
        "intermediate_size": shape.d_ff,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        **_window_keys(facts, shape),
    }
    if shape.rope_width != shape.d_head or facts.partial != (1.0,):
        # Half an element more, because the product is rounded down.
        is_part = shape.rope_width < shape.d_head
        config["partial_rotary_factor"] = (shape.rope_width + 0.5) / shape.d_head if is_part else 1.0
    if shape.rotated:
        config["no_rope_layers"] = [int(is_rotated) for is_rotated in shape.rotated]
    for key, parts in facts.biases:
        config[key] = {"qkv": shape.qkv_bias, "o": shape.o_bias, "mlp": shape.mlp_bias}[parts.split()[0]]
    if facts.activation == "gelu_tanh":
        config["hidden_activation"] = "gelu_pytorch_tanh"
    if facts.multipliers:
        config |= {
            "embedding_multiplier": shape.embed_scale,
            "residual_multiplier": shape.residual_scale,
            "attention_multiplier": shape.score_scale,
            "logits_scaling": 1 / shape.logit_scale,
        }
    if facts.scalar and shape.score_scale is not None:
        config["query_pre_attn_scalar"] = round(shape.score_scale**-2)
    if "attn" in facts.soft_caps:
        config["attn_logit_softcapping"] = shape.attn_soft_cap
    if "final" in facts.soft_caps:
        config["final_logit_softcapping"] = shape.logit_soft_cap
    if shape.experts is not None:
        count = "num_local_experts" if family == "mixtral" else "num_experts"
        config |= {count: shape.experts.n, "num_experts_per_tok": shape.experts.n_used}
        if family == "qwen3_moe":
            config |= {
                "moe_intermediate_size": shape.d_ff,
                "intermediate_size": 3 * shape.d_ff,
                "norm_topk_prob": shape.experts.normalize,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
    if family == "granitemoehybrid":
        config |= {
            "intermediate_size": 3 * shape.d_ff,
            "shared_intermediate_size": shape.d_ff,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "layer_types": ["attention"] * shape.n_layers,
        }
    return config | _rope_keys(shape, old_spelling)


def _window_keys(facts: Family, shape: Shape) -> dict[str, object]:
    if facts.window == "none":
        return {}
    keys: dict[str, object] = {"sliding_window": shape.window}
    if facts.window in ("switched", "from_layer"):
        keys["use_sliding_window"] = shape.window is not None
    if facts.window == "from_layer":
        keys["max_window_layers"] = shape.windowed.index(True) if True in shape.windowed else shape.n_layers
    if facts.window == "pattern":
        kinds = ("full_attention", "sliding_attention")
        keys["layer_types"] = [kinds[is_windowed] for is_windowed in shape.windowed]
    return keys


def _rope_keys(shape: Shape, old_spelling: bool) -> dict[str, object]:
    rope = dict(shape.rope)
    if old_spelling:
        old: dict[str, object] = {"rope_theta": shape.rope_theta, "torch_dtype": "float32"}
        if shape.local_theta is not None:
            old["rope_local_base_freq"] = shape.local_theta
        if rope:
            if rope["rope_type"] == "longrope":
                original = "original_max_position_embeddings"
                old[original] = rope.pop(original)
            old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        return old
    sets: dict[str, object] = {"rope_type": "default", **rope, "rope_theta": shape.rope_theta}
    if shape.local_theta is not None:
        local = {"rope_type": "default", "rope_theta": shape.local_theta}
        sets = {"full_attention": sets, "sliding_attention": local}
    return {"rope_parameters": sets, "dtype": "float32"}


def folder_weights(family: str, shape: Shape, weights: Weights) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a folder: renamed, reordered, fused, and with norm offsets subtracted."""
    facts = FAMILIES[family]
    stored = {}
    if facts.neighbors:
        weights = neighbors(shape, weights)
    for name, value in fuse(family, shape, weights).items():
        ours = name
        for old, new in facts.renamed:
            # Norms swap names, so each is renamed once; the name of an expert changes in two places.
            if old in name and (ours == name or facts.experts):
                ours = ours.replace(old, new)
        is_norm = value.ndim == 1 and "norm" in name
        stored[ours] = value - np.float32(facts.norm_offset) if is_norm else value
    return stored


def fuse(family: str, shape: Shape, weights: Weights) -> dict[str, NDArray[np.float32]]:
    """Return weights with the projections that the family stores in one tensor."""
    stored = dict(weights)
    for i in range(shape.n_layers):
        for name in FAMILIES[family].fused:
            prefix, parts = FUSED[name]
            names = [f"model.layers.{i}.{prefix}.{part}_proj.weight" for part in parts]
            both = np.concatenate([stored.pop(part) for part in names])
            stored[f"model.layers.{i}.{prefix}.{name}_proj.weight"] = both
    return stored


FUSED = {"qkv": ("self_attn", ("q", "k", "v")), "gate_up": ("mlp", ("gate", "up"))}


def neighbors(shape: Shape, weights: Weights, *, undo: bool = False) -> dict[str, NDArray[np.float32]]:
    """Return weights whose rotary pairs are rows 2i and 2i + 1 of a head of q and k; `undo`: the inverse."""
    half = shape.rope_width // 2
    order = np.arange(shape.d_head)
    order[: 2 * half] = np.arange(2 * half).reshape((2, half) if not undo else (half, 2)).T.reshape(-1)
    out = dict(weights)
    for name, value in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            heads = value.reshape(-1, shape.d_head, *value.shape[1:])
            out[name] = heads[:, order].reshape(value.shape)
    return out


def write_model(
    folder: Path,
    family: str,
    shape: Shape,
    weights: Weights,
    *,
    old_spelling: bool = False,
) -> Path:
    """Write a folder that the core can open; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(folder_weights(family, shape, weights), folder / "model.safetensors")
    config = config_json(family, shape, old_spelling=old_spelling)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
