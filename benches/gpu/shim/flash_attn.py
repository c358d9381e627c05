"""The two functions of flash-attn that nano-vllm calls, for machines where flash-attn cannot be installed.

Prefill is torch's `scaled_dot_product_attention`, one sequence at a time. Decode is the Triton kernel below,
with one program per sequence and KV head, over the pages of the cache. Features that nano-vllm does not use
are missing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

SHIM = "a shim over torch's sdpa and a Triton kernel (benches/gpu/shim)"
TILE = 64


@triton.jit
def _decode(
    q,
    k_cache,
    v_cache,
    out,
    lengths,
    tables,
    table_stride,
    scale,
    N_KV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    member, column = tl.arange(0, ROWS), tl.arange(0, D)
    places = (row * N_KV * GROUP + head * GROUP + member[:, None]) * D + column[None, :]
    query = tl.load(q + places, mask=member[:, None] < GROUP, other=0.0)
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < length
        page = tl.load(tables + row * table_stride + position // PAGE, mask=seen, other=0).to(tl.int64)
        cell = ((page * PAGE + position % PAGE) * N_KV + head) * D
        at = cell[:, None] + column[None, :]
        key = tl.load(k_cache + at, mask=seen[:, None], other=0.0)
        score = tl.where(seen[None, :], tl.dot(query, tl.trans(key)) * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(best - higher)
        value = tl.load(v_cache + at, mask=seen[:, None], other=0.0)
        total = total * fade + tl.sum(weight, 1)
        summed = summed * fade[:, None] + tl.dot(weight.to(value.dtype), value)
        best = higher
    # A padding row of a graph has length 0.
    total = tl.where(total > 0, total, 1.0)
    tl.store(out + places, (summed / total[:, None]).to(out.dtype.element_ty), mask=member[:, None] < GROUP)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal):
    """Decode: `q [rows, 1, heads, d]`, caches `[pages, page, kv_heads, d]`, which have the new positions."""
    assert causal
    assert q.shape[1] == 1
    rows, _, n_heads, d = q.shape
    _, page, n_kv, _ = k_cache.shape
    group, out = n_heads // n_kv, torch.empty_like(q)
    _decode[(rows, n_kv)](
        q.contiguous(),
        k_cache,
        v_cache,
        out,
        cache_seqlens,
        block_table,
        block_table.stride(0),
        softmax_scale,
        N_KV=n_kv,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        D=d,
        PAGE=page,
        TILE=TILE,
    )
    return out


def flash_attn_varlen_func(
    q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, block_table
):
    """Prefill: `q [tokens, heads, d]`; K and V `[tokens, kv_heads, d]`, or caches and pages by sequence."""
    assert causal
    del max_seqlen_q, max_seqlen_k
    out = torch.empty_like(q)
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(queries) - 1):
        mine = slice(queries[i], queries[i + 1])
        n_q, n_k = mine.stop - mine.start, keys[i + 1] - keys[i]
        if block_table is None:
            key, value = k[keys[i] : keys[i + 1]], v[keys[i] : keys[i + 1]]
        else:
            pages = block_table[i, : -(-n_k // k.shape[1])]
            key, value = (cache[pages].flatten(0, 1)[:n_k] for cache in (k, v))
        three = (each.transpose(0, 1)[None] for each in (q[mine], key, value))
        mask = {"is_causal": True} if n_q == n_k else {"attn_mask": causal_lower_right(n_q, n_k)}
        made = scaled_dot_product_attention(*three, scale=softmax_scale, enable_gqa=True, **mask)
        out[mine] = made[0].transpose(0, 1)
    return out
