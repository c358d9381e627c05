"""The forward pass of every family in float64 NumPy: the reference for the core on random configurations.

Formulas: RMSNorm arXiv:1910.07467, RoPE arXiv:2104.09864 in half-split order, its scalings as in
transformers' `modeling_rope_utils`, grouped-query attention arXiv:2305.13245, gated feed-forward
arXiv:2002.05202, soft caps arXiv:2408.00118, experts arXiv:2401.04088.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in every layer."""

    n: int
    n_used: int
    normalize: bool


@dataclass(frozen=True)
class Shape:
    """The configuration of a model."""

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
    qk_norm: str  # "none", "head", "rotated_head" (after the rotary embedding), "projection"
    tied: bool
    max_positions: int = 256
    rope: Mapping[str, Any] = field(default_factory=dict)  # a set of `rope_parameters` without its base
    context: int = 64  # `max_model_len`, which chooses the factors of LongRoPE
    d_rope: int | None = None  # rotated elements of a head; None: all
    rotated: tuple[bool, ...] = ()  # by layer; empty: all
    query_scaling: tuple[float, int] | None = None  # beta, positions of the original context
    local_theta: float | None = None  # of layers with a window
    window: int | None = None
    windowed: tuple[bool, ...] = ()  # by layer; empty: none
    pre_norms: bool = True
    post_norms: bool = False
    activation: str = "silu"  # or "gelu_tanh"
    score_scale: float | None = None  # None: 1 / sqrt(d_head)
    attn_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    o_bias: bool = False
    mlp_bias: bool = False

    @property
    def rope_width(self) -> int:
        """The rotated elements of a head."""
        return self.d_head if self.d_rope is None else self.d_rope


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    return x * weight / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def soft_cap(x: F64, cap: float | None) -> F64:
    return x if cap is None else cap * np.tanh(x / cap)


def rope_frequencies(shape: Shape) -> F64:
    """Return radians per position for layers without a window, `[d_rope / 2]`, scaled."""
    width, theta, rope = shape.rope_width, shape.rope_theta, shape.rope
    half = width // 2
    plain = np.asarray(theta ** (-np.arange(half) / half))
    kind, factor = rope.get("rope_type", "default"), rope.get("factor", 1.0)
    if kind == "dynamic":
        return np.asarray(stretched_theta(shape) ** (-np.arange(half) / half))
    if kind == "linear":
        return plain / factor
    if kind == "llama3":
        turns = rope["original_max_position_embeddings"] * plain / math.tau
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return keep * plain + (1 - keep) * plain / factor
    if kind == "yarn":
        original = rope["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return width * math.log(original / (turns * math.tau)) / (2 * math.log(theta))

        first = max(math.floor(pair(rope.get("beta_fast", 32))), 0)
        last = min(math.ceil(pair(rope.get("beta_slow", 1))), width - 1)
        slow = np.clip((np.arange(half) - first) / ((last - first) or 0.001), 0, 1)
        return slow * plain / factor + (1 - slow) * plain
    if kind == "longrope":
        is_long = shape.context > rope["original_max_position_embeddings"]
        return plain / np.asarray(rope["long_factor" if is_long else "short_factor"])
    return plain


def stretched_theta(shape: Shape) -> float:
    """Return Hunyuan's base: stretched once, whatever the length of a sequence."""
    return float(shape.rope_theta * shape.rope["alpha"] ** (shape.d_head / (shape.d_head - 2)))


def rope_amplitude(shape: Shape) -> float:
    """Return the factor of rotated rows in layers without a window."""
    rope = shape.rope
    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    if rope.get("rope_type") == "yarn":
        log = 0.1 * math.log(rope["factor"])
        return (log + 1) / (log * rope.get("mscale_all_dim", 0) + 1)
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(shape.max_positions / original) / math.log(original))
    return 1.0


def rope(x: F64, frequencies: F64, amplitude: float) -> F64:
    """Rotate the first `d_rope` elements of `x` `[T, heads, d_head]`, row t at position t.

    Pairs are `(i, i + d_rope / 2)`.
    """
    half = len(frequencies)
    angle = np.arange(x.shape[0])[:, None] * frequencies
    cos, sin = amplitude * np.cos(angle)[:, None], amplitude * np.sin(angle)[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def query_factors(shape: Shape, n_tokens: int) -> F64:
    """Return the factor of rotated queries at each position, `[T, 1, 1]`."""
    if shape.query_scaling is None:
        return np.ones((1, 1, 1))
    beta, original = shape.query_scaling
    return np.asarray(1 + beta * np.log1p(np.arange(n_tokens) // original))[:, None, None]


def attention(shape: Shape, q: F64, k: F64, v: F64, window: int | None) -> F64:
    """Return causal attention `[T, heads * d]` of `q` `[T, heads, d]`, `k` and `v` `[T, kv_heads, d]`."""
    n_tokens, n_heads, d_head = q.shape
    group = n_heads // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = d_head**-0.5 if shape.score_scale is None else shape.score_scale
    scores = soft_cap(np.einsum("thd,shd->hts", q, k) * scale, shape.attn_soft_cap)
    back = np.arange(n_tokens)[:, None] - np.arange(n_tokens)
    seen = (back >= 0) & (back < (window or n_tokens))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(n_tokens, -1)


class _Layer:
    """The weights of one layer, by their names in Llama."""

    def __init__(self, shape: Shape, weights: Mapping[str, F64], index: int) -> None:
        self.shape, self.weights, self.index = shape, weights, index
        self.gap = np.inf  # between the last expert chosen and the first that was not

    def linear(self, x: F64, name: str) -> F64:
        y = x @ self.weights[f"model.layers.{self.index}.{name}.weight"].T
        bias = self.weights.get(f"model.layers.{self.index}.{name}.bias")
        return y if bias is None else y + bias

    def norm(self, x: F64, name: str, wanted: bool = True) -> F64:
        if not wanted:
            return x
        return rms_norm(x, self.weights[f"model.layers.{self.index}.{name}.weight"], self.shape.rms_eps)

    def head_norm(self, x: F64, name: str) -> F64:
        if self.shape.qk_norm == "projection":
            return self.norm(x.reshape(len(x), -1), name).reshape(x.shape)
        return self.norm(x, name, self.shape.qk_norm != "none")

    def attend(self, x: F64, turns: F64) -> F64:
        s, t = self.shape, len(x)
        h = self.norm(x, "input_layernorm", s.pre_norms)
        q = self.linear(h, "self_attn.q_proj").reshape(t, s.n_heads, s.d_head)
        k = self.linear(h, "self_attn.k_proj").reshape(t, s.n_kv_heads, s.d_head)
        v = self.linear(h, "self_attn.v_proj").reshape(t, s.n_kv_heads, s.d_head)
        norms_rotated = s.qk_norm == "rotated_head"
        if not norms_rotated:
            q, k = self.head_norm(q, "self_attn.q_norm"), self.head_norm(k, "self_attn.k_norm")
        is_windowed, amplitude = bool(s.windowed) and s.windowed[self.index], rope_amplitude(s)
        if is_windowed and s.local_theta is not None:
            half = s.rope_width // 2
            turns, amplitude = s.local_theta ** (-np.arange(half) / half), 1.0
        if not s.rotated or s.rotated[self.index]:
            q, k = rope(q, turns, amplitude), rope(k, turns, amplitude)
        if norms_rotated:
            q, k = self.head_norm(q, "self_attn.q_norm"), self.head_norm(k, "self_attn.k_norm")
        q = q * query_factors(s, t)
        mixed = self.linear(attention(s, q, k, v, s.window if is_windowed else None), "self_attn.o_proj")
        return self.norm(mixed, "attn_post_norm", s.post_norms)

    def mlp(self, x: F64, name: str) -> F64:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        if self.shape.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return self.linear(gate * up, f"{name}.down_proj")

    def feed_forward(self, x: F64) -> F64:
        h = self.norm(x, "post_attention_layernorm", self.shape.pre_norms)
        experts = self.shape.experts
        y = self.mlp(h, "mlp") if experts is None else self.mixture(h, experts)
        return self.norm(y, "ffn_post_norm", self.shape.post_norms)

    def mixture(self, x: F64, experts: Experts) -> F64:
        logits = self.linear(x, "mlp.gate")
        share = np.exp(logits - logits.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        order = np.argsort(-logits, axis=-1, kind="stable")
        if experts.n_used < experts.n:
            ranked = np.take_along_axis(logits, order, -1)
            self.gap = float((ranked[:, experts.n_used - 1] - ranked[:, experts.n_used]).min())
        y = np.zeros_like(x)
        for t, chosen in enumerate(order[:, : experts.n_used]):
            total = share[t, chosen].sum() if experts.normalize else 1.0
            for e in chosen:
                y[t] += share[t, e] / total * self.mlp(x[t], f"mlp.experts.{e}")
        return y


def forward(
    shape: Shape,
    w: Mapping[str, NDArray[np.float32]],
    tokens: Sequence[int],
    gaps: list[float] | None = None,
) -> tuple[F64, F64]:
    """Return logits `[T, vocab]` and final hidden states `[T, d_model]`.

    Weight names are those of Llama in Hugging Face folders; norm weights are complete (not minus one).
    `gaps` receives the smallest distance between chosen and other experts' logits of each layer.
    """
    frequencies = rope_frequencies(shape)
    get = {name: value.astype(np.float64) for name, value in w.items()}
    x = get["model.embed_tokens.weight"][list(tokens)] * shape.embed_scale
    for i in range(shape.n_layers):
        layer = _Layer(shape, get, i)
        x = x + shape.residual_scale * layer.attend(x, frequencies)
        x = x + shape.residual_scale * layer.feed_forward(x)
        if gaps is not None:
            gaps.append(layer.gap)
    hidden = rms_norm(x, get["model.norm.weight"], shape.rms_eps)
    head = get["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    return soft_cap(hidden @ head.T * shape.logit_scale, shape.logit_soft_cap), hidden
