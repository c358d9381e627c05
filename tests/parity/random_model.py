"""Random small models of every family, and Hugging Face folders of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from parity.numpy_forward import Experts, Shape

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Family:
    """The properties that all models of a family share."""

    architecture: str
    gguf: str | None = None  # `general.architecture`; None: its files are another family's
    # Keys of `config.json` and the projections whose biases they switch on.
    biases: tuple[tuple[str, str], ...] = ()
    qkv_bias: bool = False  # always
    qk_norm: str = "none"
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0  # subtracted from norm weights in a folder
    activation: str = "silu"
    window: str = "none"  # or "all", "switched", "from_layer", "pattern"
    local_rope: bool = False
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    multipliers: bool = False
    scalar: bool = False
    soft_caps: tuple[str, ...] = ()
    experts: bool = False
    renamed: tuple[tuple[str, str], ...] = ()  # Llama's names -> a folder's


_FOUR_NORMS = (
    ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ("attn_post_norm", "post_attention_layernorm"),
    ("ffn_post_norm", "post_feedforward_layernorm"),
)
_MIXTRAL = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"), ("mlp.", "block_sparse_moe."))
_GEMMA: dict[str, Any] = {
    "post_norms": True,
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "window": "pattern",
    "scalar": True,
    "renamed": _FOUR_NORMS,
}

_ATTENTION_BIAS = (("attention_bias", "qkv o"),)
_LLAMA_BIASES = (*_ATTENTION_BIAS, ("mlp_bias", "mlp"))
_SEED_OSS_BIASES = (("attention_bias", "qkv"), ("attention_out_bias", "o"), ("mlp_bias", "mlp"))
_HUNYUAN = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
_SHARED_MLP = (
    ("mlp.gate_up_proj", "shared_mlp.input_linear"),
    ("mlp.down_proj", "shared_mlp.output_linear"),
)

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", biases=_LLAMA_BIASES),
    "mistral": Family("MistralForCausalLM", window="all"),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, window="from_layer"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", qk_norm="head", window="from_layer", biases=_ATTENTION_BIAS),
    "phi3": Family("Phi3ForCausalLM", "phi3", window="all", ropes=("default", "longrope")),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "olmo2",
        biases=_ATTENTION_BIAS,
        qk_norm="projection",
        pre_norms=False,
        post_norms=True,
        renamed=_FOUR_NORMS,
    ),
    "granite": Family("GraniteForCausalLM", "granite", biases=_LLAMA_BIASES, multipliers=True),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granite",
        biases=_ATTENTION_BIAS,
        multipliers=True,
        renamed=_SHARED_MLP,
    ),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", biases=_SEED_OSS_BIASES),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan-dense",
        biases=_ATTENTION_BIAS,
        qk_norm="rotated_head",
        ropes=("default", "dynamic"),
        renamed=_HUNYUAN,
    ),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", soft_caps=("attn", "final"), **_GEMMA),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "gemma3", qk_norm="head", local_rope=True, soft_caps=("final",), **_GEMMA
    ),
    "mixtral": Family("MixtralForCausalLM", "llama", window="all", experts=True, renamed=_MIXTRAL),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "qwen3moe", qk_norm="head", window="switched", experts=True),
}


@st.composite
def shapes(draw: st.DrawFn, family: str, gguf: bool = False) -> Shape:
    """Draw odd sizes: only an even `d_head` and whole groups of heads are required. `gguf`: only what a GGUF
    file can express."""
    facts = FAMILIES[family]
    n_layers, n_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_heads, d_head = n_kv_heads * draw(st.integers(1, 4)), 2 * draw(st.integers(2, 40))
    d_model = draw(st.integers(3, 70))
    scale = st.sampled_from([0.25, 0.5, 1.5])
    cap = st.sampled_from([2.0, 30.0]) if gguf else st.sampled_from([None, 2.0, 30.0])
    window, windowed = draw(_windows(facts, n_layers, gguf))
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
        rope_theta=draw(st.sampled_from([1e4, 5e5, 1e6])),
        rms_eps=draw(st.sampled_from([1e-6, 1e-5])),
        qkv_bias=facts.qkv_bias or "qkv" in biased,
        o_bias="o" in biased,
        mlp_bias="mlp" in biased,
        qk_norm=facts.qk_norm,
        tied=draw(st.booleans()),
        rope=draw(_ropes(facts, d_head)),
        local_theta=(1e4 if gguf else draw(st.sampled_from([1e4, 1e3]))) if facts.local_rope else None,
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


_MULTIPLIERS = ("embed_scale", "residual_scale", "logit_scale", "score_scale")


@st.composite
def _windows(
    draw: st.DrawFn, facts: Family, n_layers: int, gguf: bool
) -> tuple[int | None, tuple[bool, ...]]:
    # GGUF files of these families have no key for a window.
    if facts.window == "none" or (gguf and facts.gguf not in ("phi3", "gemma2", "gemma3")):
        return None, ()
    window = draw(st.sampled_from([None, 1, 7, 20, 33]) if facts.window != "pattern" else st.integers(1, 33))
    if facts.window in ("all", "switched"):
        return window, (window is not None,) * n_layers
    if facts.window == "from_layer":
        first = draw(st.integers(0, n_layers))
        return window, tuple(window is not None and i >= first for i in range(n_layers))
    every = 2 if facts.gguf == "gemma2" else 6 if gguf else draw(st.integers(1, 3))
    return window, tuple((i + 1) % every != 0 for i in range(n_layers))


@st.composite
def _ropes(draw: st.DrawFn, facts: Family, d_head: int) -> dict[str, Any]:
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
        return {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": original,
            **betas,
        }
    if kind == "longrope":
        numbers = st.floats(1, 8, width=32)
        factors = draw(st.lists(numbers, min_size=d_head // 2, max_size=d_head // 2))
        return {
            "rope_type": kind,
            "original_max_position_embeddings": 64,
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
    """Return the tensors of a folder: renamed, with norm offsets subtracted and projections fused."""
    facts = FAMILIES[family]
    stored = {}
    if family == "granitemoehybrid":
        weights = _with_fused_gate(shape, weights)
    for name, value in weights.items():
        ours = name
        for old, new in facts.renamed:
            # Norms swap names, so each is renamed once; the name of an expert changes in two places.
            if old in name and (ours == name or facts.experts):
                ours = ours.replace(old, new)
        is_norm = value.ndim == 1 and "norm" in name
        stored[ours] = value - np.float32(facts.norm_offset) if is_norm else value
    if family == "phi3":
        for i in range(shape.n_layers):
            layer = f"model.layers.{i}."
            qkv = [stored.pop(f"{layer}self_attn.{part}_proj.weight") for part in "qkv"]
            both = [stored.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up")]
            stored[layer + "self_attn.qkv_proj.weight"] = np.concatenate(qkv)
            stored[layer + "mlp.gate_up_proj.weight"] = np.concatenate(both)
    return stored


def _with_fused_gate(shape: Shape, weights: Weights) -> Weights:
    fused = dict(weights)
    for i in range(shape.n_layers):
        parts = [fused.pop(f"model.layers.{i}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        fused[f"model.layers.{i}.mlp.gate_up_proj.weight"] = np.concatenate(parts)
    return fused


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
