"""The physical limit of a row: the bytes that it has to read and the operations that it has to compute.

A step cannot be faster than reading its weights and cells at the machine's read bandwidth, nor than its
operations at the peak rate of the instructions. The larger of these times, divided by the time that the step
takes, is the row's share of the limit; 1 is the limit. Both rates are measured around each engine, in the
same minute (`machine_speed.rs`). Dot instructions of bf16 count as twice, those of 8-bit integers as four
times the f32 rate (as on Zen 4 and 5; elsewhere shares may be too low). What is not a product is not counted,
so shares are lower bounds.

Experts are counted as if tokens chose them evenly, which is close for random weights and tokens: 16 tokens
that use 8 of 128 experts read 82. Rows of other models have no limit here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

Round = dict[str, Any]

# Bytes of a weight of the layers, and instructions of a weight compared with f32's, by precision.
LAYER_WEIGHT = {"bf16": (2.0, 2), "8bit": (34 / 32, 4), "4bit": (18 / 32, 4)}
INTEGERS = 4
ATTENTION = 2  # products of attention are in bf16

# The least share, by kind and streams.
DECODE_1_AT_LEAST = 0.9
OTHERS_AT_LEAST = 0.8


@dataclass(frozen=True)
class Shape:
    """A model: its numbers of layers, heads and weights."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    # Weights of all layers that every token uses, and those of one expert of each layer.
    n_dense: int
    n_expert: int = 0
    n_experts: int = 1
    n_experts_used: int = 0

    @property
    def n_head(self) -> int:
        """Weights of the language model head."""
        return self.vocab_size * self.d_model

    @property
    def n_multiplied(self) -> int:
        """Weights of the layers that a token is multiplied with."""
        return self.n_dense + self.n_experts_used * self.n_expert

    @property
    def cell_bytes(self) -> int:
        """Bytes of K and V of one cell, in bf16."""
        return self.n_layers * 2 * self.n_kv_heads * self.d_head * 2

    def n_read(self, n_tokens: int) -> float:
        """Return how many weights of the layers are read for a pass of `n_tokens`."""
        unused = (1 - self.n_experts_used / self.n_experts) ** n_tokens
        return self.n_dense + self.n_experts * (1 - unused) * self.n_expert

    def head_bytes(self, precision: str) -> float:
        """Return the bytes of the head that a step reads.

        Of a head in bf16 a greedy step reads the copy in 8 bits with two norms per row (`screen_lm_head`);
        the few exact rows are not counted. In 4-bit files the head has 8 bits.
        """
        return self.n_head * 34 / 32 + (8 * self.vocab_size if precision == "bf16" else 0)


# Qwen2.5-0.5B, whose head is the embedding, and six layers of Qwen3-30B-A3B (`peers_shapes.py`).
DENSE = Shape(
    vocab_size=151_936,
    d_model=896,
    n_layers=24,
    n_heads=14,
    n_kv_heads=2,
    d_head=64,
    n_dense=494_032_768 - 151_936 * 896,
)
EXPERTS = Shape(
    vocab_size=49_152,
    d_model=2048,
    n_layers=6,
    n_heads=32,
    n_kv_heads=4,
    d_head=128,
    n_dense=6 * 2048 * (2 * 4096 + 2 * 512 + 128),
    n_expert=6 * 3 * 2048 * 768,
    n_experts=128,
    n_experts_used=8,
)


def step_s(shape: Shape, precision: str, n_streams: int, context: int, speed: tuple[float, float]) -> float:
    """Return the least seconds of a decode step. `speed`: 10^9 bytes and 10^9 f32 operations per second."""
    weight_bytes, rate = LAYER_WEIGHT[precision]
    cells = n_streams * context * shape.cell_bytes
    n_bytes = shape.n_read(n_streams) * weight_bytes + shape.head_bytes(precision) + cells
    attention = 4 * shape.n_layers * shape.n_heads * shape.d_head * context / ATTENTION
    operations = n_streams * (2 * shape.n_multiplied / rate + 2 * shape.n_head / INTEGERS + attention)
    return max(n_bytes / speed[0], operations / speed[1]) / 1e9


def prompt_s(shape: Shape, precision: str, n_tokens: int, speed: tuple[float, float]) -> float:
    """Return the least seconds of a prompt. Only its last token needs the head."""
    weight_bytes, rate = LAYER_WEIGHT[precision]
    n_bytes = shape.n_read(n_tokens) * weight_bytes + shape.head_bytes(precision)
    attention = 4 * shape.n_layers * shape.n_heads * shape.d_head * n_tokens * n_tokens / 2 / ATTENTION
    operations = n_tokens * 2 * shape.n_multiplied / rate + 2 * shape.n_head / INTEGERS + attention
    return max(n_bytes / speed[0], operations / speed[1]) / 1e9


def limit_share(found: list[Round], engine: str) -> float | None:
    """Return the median share of the limit of an engine's rounds of a row; None if the row has no limit."""
    kind, n_text, precision = found[0]["row"].split("-", 2)
    shape = EXPERTS if precision.startswith("experts-") else DENSE
    precision = precision.removeprefix("experts-")
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
                step_s(shape, precision, n, int(context), speed)
                if kind == "decode"
                else prompt_s(shape, precision, n, speed)
            )
            shares.append(least * rate / n)
    return statistics.median(shares) if shares else None


def least_share(row: str) -> float:
    """Return the share that a row should reach: 0.9 with one stream, which only reads, else 0.8."""
    return DECODE_1_AT_LEAST if row.startswith("decode-1-") else OTHERS_AT_LEAST
