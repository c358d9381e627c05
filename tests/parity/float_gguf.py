"""SmolLM2 as a float checkpoint: its weights in BF16, and an equivalent model with permuted weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from llaisys.model_info import ModelInfo
from parity.gguf_files import Matrix, write_like


def write_bf16(source: Path, target: Path, tensors: dict[str, Matrix]) -> Path:
    """Write a file with the metadata of `source`, matrices in BF16 and vectors in F32; return `target`."""
    typed = {}
    for name, values in tensors.items():
        kind = "F32" if values.ndim == 1 else "BF16"
        data = gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind])
        typed[name] = (kind, values.shape, data.tobytes())
    return write_like(source, target, typed)


def shuffled(tensors: dict[str, Matrix], info: ModelInfo) -> dict[str, Matrix]:
    """Return weights of the same function of a Llama with a tied head, with its inner channels permuted.

    Permuted are the residual stream, the inner channels of each feed-forward part, and the channels of each
    value head. Queries and keys keep their order because of the rotary pairs. The seed is fixed.
    """
    rng = np.random.default_rng(5)
    stream = rng.permutation(info.d_model)
    readers = ("token_embd", "attn_q.", "attn_k.", "attn_v.", "ffn_gate.", "ffn_up.")
    out = {}
    for name, values in tensors.items():
        is_reader = any(part in name for part in readers)
        out[name] = values[:, stream] if is_reader else values[stream]
    for layer in range(info.n_layers):
        inner = rng.permutation(info.d_ff)
        gate, up, down, v, o = (
            f"blk.{layer}.{part}.weight"
            for part in ("ffn_gate", "ffn_up", "ffn_down", "attn_v", "attn_output")
        )
        out[gate], out[up], out[down] = out[gate][inner], out[up][inner], out[down][:, inner]
        heads = out[v].reshape(info.n_kv_heads, info.d_head, -1).copy()
        users = out[o].reshape(info.d_model, info.n_kv_heads, -1, info.d_head).copy()
        for head in range(info.n_kv_heads):
            channels = rng.permutation(info.d_head)
            heads[head] = heads[head][channels]
            users[:, head] = users[:, head][..., channels]
        out[v], out[o] = heads.reshape(out[v].shape), users.reshape(out[o].shape)
    return out
