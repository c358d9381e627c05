"""The forward pass of the Llama, Qwen2 and Qwen3 families on a page, in float64 NumPy.

The truth that the core is held against on random configurations. Formulas: RMSNorm arXiv:1910.07467; RoPE
arXiv:2104.09864 in half-split order; grouped-query attention arXiv:2305.13245; SwiGLU arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """What differs between two models of these families."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x * weight / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rope_frequencies(shape: Shape) -> F64:
    """Radians a position, `[d_head / 2]`."""
    half = shape.d_head // 2
    return np.asarray(shape.rope_theta ** (-np.arange(half) / half))


def rope(x: F64, frequencies: F64) -> F64:
    """`x` `[T, heads, d_head]`, row t at position t; pairs are `(i, i + d_head / 2)`."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * frequencies
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: F64, k: F64, v: F64) -> F64:
    """Causal; `q` `[T, heads, d]`, `k` and `v` `[T, kv_heads, d]` -> `[T, heads * d]`."""
    n_tokens, n_heads, d_head = q.shape
    group = n_heads // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(d_head)
    scores = np.where(np.tril(np.ones((n_tokens, n_tokens), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(n_tokens, -1)


def forward(
    shape: Shape,
    w: Mapping[str, NDArray[np.float32]],
    tokens: Sequence[int],
    frequencies: F64 | None = None,
) -> tuple[F64, F64]:
    """Logits `[T, vocab]` and final hidden states `[T, d_model]`. Weight names are Hugging Face's.
    `frequencies` replaces `rope_frequencies(shape)`.
    """
    t = len(tokens)
    turns = rope_frequencies(shape) if frequencies is None else frequencies
    get = {name: value.astype(np.float64) for name, value in w.items()}
    x = get["model.embed_tokens.weight"][list(tokens)]
    for i in range(shape.n_layers):
        layer = f"model.layers.{i}."

        def linear(h: F64, name: str, layer: str = layer) -> F64:
            bias = get.get(f"{layer}{name}.bias")
            y = h @ get[f"{layer}{name}.weight"].T
            return y if bias is None else y + bias

        h = rms_norm(x, get[layer + "input_layernorm.weight"], shape.rms_eps)
        q = linear(h, "self_attn.q_proj").reshape(t, shape.n_heads, shape.d_head)
        k = linear(h, "self_attn.k_proj").reshape(t, shape.n_kv_heads, shape.d_head)
        v = linear(h, "self_attn.v_proj").reshape(t, shape.n_kv_heads, shape.d_head)
        if shape.qk_norm:
            q = rms_norm(q, get[layer + "self_attn.q_norm.weight"], shape.rms_eps)
            k = rms_norm(k, get[layer + "self_attn.k_norm.weight"], shape.rms_eps)
        mixed = attention(rope(q, turns), rope(k, turns), v)
        x = x + linear(mixed, "self_attn.o_proj")
        h = rms_norm(x, get[layer + "post_attention_layernorm.weight"], shape.rms_eps)
        gate, up = linear(h, "mlp.gate_proj"), linear(h, "mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
    hidden = rms_norm(x, get["model.norm.weight"], shape.rms_eps)
    head = get["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    return hidden @ head.T, hidden
