"""The physical limit of a row: the bytes that it has to read and the operations that it has to compute.

A step cannot be faster than reading its weights and cells at the machine's read bandwidth, nor than its
operations at the peak rate of the instructions. The larger of these times, divided by the time that the step
takes, is the row's share of the limit; 1 is the limit. Both rates are measured around each engine, in the
same minute (`machine_speed.rs`). Dot instructions of bf16 count as twice, those of 8-bit integers as four
times the f32 rate (as on Zen 4 and 5; elsewhere shares may be too low). What is not a product is not counted,
so shares are lower bounds.

Only the rows of the dense model have a limit here: those of Qwen2.5-0.5B's shape.
"""

from __future__ import annotations

import statistics
from typing import Any

Round = dict[str, Any]

# The shape: weights of the layers and of the head, which is the embedding.
VOCAB_SIZE, HEAD = 151_936, 151_936 * 896
LAYERS = 494_032_768 - HEAD
N_LAYERS, N_HEADS, D_HEAD = 24, 14, 64
# Bytes of K and V of one cell: 2 heads of 64 numbers in bf16, twice, in each layer.
CELL_BYTES = N_LAYERS * 2 * D_HEAD * 2 * 2
# Bytes of a weight of the layers, and instructions of a weight compared with f32's, by precision.
LAYER_WEIGHT = {"bf16": (2.0, 2), "8bit": (34 / 32, 4), "4bit": (18 / 32, 4)}
INTEGERS = 4
ATTENTION = 2  # products of attention are in bf16

# The least share, by kind and streams.
DECODE_1_AT_LEAST = 0.9
OTHERS_AT_LEAST = 0.8


def head_bytes(precision: str) -> float:
    """Return the bytes of the head that a step reads.

    Of a head in bf16 a greedy step reads the copy in 8 bits with two norms per row (`screen_lm_head`); the
    few exact rows are not counted. In 4-bit files the head has 8 bits.
    """
    return HEAD * 34 / 32 + (8 * VOCAB_SIZE if precision == "bf16" else 0)


def step_s(precision: str, n_streams: int, context: int, speed: tuple[float, float]) -> float:
    """Return the least seconds of a decode step. `speed`: 10^9 bytes and 10^9 f32 operations per second."""
    weight_bytes, rate = LAYER_WEIGHT[precision]
    n_bytes = LAYERS * weight_bytes + head_bytes(precision) + n_streams * context * CELL_BYTES
    attention = 4 * N_LAYERS * N_HEADS * D_HEAD * context / ATTENTION
    operations = n_streams * (2 * LAYERS / rate + 2 * HEAD / INTEGERS + attention)
    return max(n_bytes / speed[0], operations / speed[1]) / 1e9


def prompt_s(precision: str, n_tokens: int, speed: tuple[float, float]) -> float:
    """Return the least seconds of a prompt. Only its last token needs the head."""
    weight_bytes, rate = LAYER_WEIGHT[precision]
    n_bytes = LAYERS * weight_bytes + head_bytes(precision)
    attention = 4 * N_LAYERS * N_HEADS * D_HEAD * n_tokens * n_tokens / 2 / ATTENTION
    operations = n_tokens * 2 * LAYERS / rate + 2 * HEAD / INTEGERS + attention
    return max(n_bytes / speed[0], operations / speed[1]) / 1e9


def limit_share(found: list[Round], engine: str) -> float | None:
    """Return the median share of the limit of an engine's rounds of a row; None if the row has no limit."""
    kind, n_text, precision = found[0]["row"].split("-", 2)
    if precision not in LAYER_WEIGHT or kind not in ("decode", "prefill"):
        return None
    shares = []
    for each in found:
        if engine not in each["rates"] or "gflops" not in each:
            continue
        place, n = each["order"].index(engine), int(n_text)
        gb_s, gflops = ((each[key][place] + each[key][place + 1]) / 2 for key in ("gb_s", "gflops"))
        speed = (gb_s, gflops)
        for context, rate in each["rates"][engine].items():
            least = (
                step_s(precision, n, int(context), speed)
                if kind == "decode"
                else prompt_s(precision, n, speed)
            )
            shares.append(least * rate / n)
    return statistics.median(shares) if shares else None


def least_share(row: str) -> float:
    """Return the share that a row should reach: 0.9 with one stream, which only reads, else 0.8."""
    return DECODE_1_AT_LEAST if row.startswith("decode-1-") else OTHERS_AT_LEAST
