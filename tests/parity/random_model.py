"""Random small checkpoints of every family row, written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from parity.numpy_forward import Shape

FAMILIES = {
    "llama": ("LlamaForCausalLM", False, False),
    "qwen2": ("Qwen2ForCausalLM", True, False),
    "qwen3": ("Qwen3ForCausalLM", False, True),
}


@st.composite
def shapes(draw: st.DrawFn, family: str) -> Shape:
    """Odd sizes on purpose: nothing but `d_head` even and whole groups of heads is asked of a model."""
    _, bias, norm = FAMILIES[family]
    n_kv_heads = draw(st.integers(1, 3))
    return Shape(
        n_layers=draw(st.integers(1, 3)),
        d_model=draw(st.integers(3, 70)),
        n_heads=n_kv_heads * draw(st.integers(1, 4)),
        n_kv_heads=n_kv_heads,
        d_head=2 * draw(st.integers(2, 40)),
        d_ff=draw(st.integers(1, 90)),
        vocab_size=draw(st.integers(10, 130)),
        rope_theta=draw(st.sampled_from([1e4, 5e5, 1e6])),
        rms_eps=draw(st.sampled_from([1e-6, 1e-5])),
        qkv_bias=bias,
        qk_norm=norm,
        tied=draw(st.booleans()),
    )


def random_weights(shape: Shape, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights of the scale that keeps activations near 1."""
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
    for i in range(shape.n_layers):
        layer = f"model.layers.{i}."
        w[layer + "input_layernorm.weight"] = norm(shape.d_model)
        w[layer + "post_attention_layernorm.weight"] = norm(shape.d_model)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            w[f"{layer}self_attn.{name}_proj.weight"] = matrix(size, shape.d_model)
            if shape.qkv_bias:
                w[f"{layer}self_attn.{name}_proj.bias"] = matrix(size, 1)[:, 0] * 0.3
            if shape.qk_norm and name != "v":
                w[f"{layer}self_attn.{name}_norm.weight"] = norm(shape.d_head)
        w[layer + "self_attn.o_proj.weight"] = matrix(shape.d_model, q_size)
        w[layer + "mlp.gate_proj.weight"] = matrix(shape.d_ff, shape.d_model)
        w[layer + "mlp.up_proj.weight"] = matrix(shape.d_ff, shape.d_model)
        w[layer + "mlp.down_proj.weight"] = matrix(shape.d_model, shape.d_ff)
    return w


def config_json(family: str, shape: Shape, *, old_spelling: bool = False) -> dict[str, object]:
    """`config.json` of a shape, in the new spelling (`rope_parameters`, `dtype`) or the old."""
    config: dict[str, object] = {
        "architectures": [FAMILIES[family][0]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.d_head,
        "intermediate_size": shape.d_ff,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 256,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if old_spelling:
        return config | {"rope_theta": shape.rope_theta, "torch_dtype": "float32"}
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    return config | {"rope_parameters": rope, "dtype": "float32"}


def write_model(
    folder: Path,
    family: str,
    shape: Shape,
    weights: dict[str, NDArray[np.float32]],
    *,
    old_spelling: bool = False,
) -> Path:
    """A folder that the core can open. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = config_json(family, shape, old_spelling=old_spelling)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
