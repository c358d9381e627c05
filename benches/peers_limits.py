"""The physical limit of a row: the bytes that it has to read and the operations that it has to compute.

A step cannot be faster than reading its weights and cells at the machine's read bandwidth, nor than its
operations at the peak rate of the instructions. The larger of these times, divided by the time that the step
takes, is the row's share of the limit; 1 is the limit. Both rates are measured around each engine, in the
same minute (`machine_speed.rs`). Products of bf16 and of 8-bit integers count as a multiple of the f32 rate
that depends on the instruction set. What is not a product is not counted, so shares are lower bounds.

Experts are counted as if tokens chose them evenly, which is close for random weights and tokens: 16 tokens
that use 8 of 128 experts read 82. Rows of other models, and those with a shared prompt, have no limit here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from peers_rows import LONG, Row, isa

Round = dict[str, Any]

# Bytes of a weight of the layers, by precision.
WEIGHT_BYTES = {"bf16": 2.0, "8bit": 34 / 32, "4bit": 18 / 32}

# The least share, by kind and streams.
DECODE_1_AT_LEAST = 0.9
DECODE_1_LONG_AT_LEAST = 0.85
OTHERS_AT_LEAST = 0.8


@dataclass(frozen=True)
class Speed:
    """The machine around an engine's measurement: 10^9 bytes and 10^9 f32 operations per second, and how
    many times as fast it multiplies bf16 and 8-bit integers."""

    gb_s: float
    gflops: float
    bf16: float
    integers: float

    @classmethod
    def of(cls, gb_s: float, gflops: float, instructions: str) -> Speed:
        """Return the speed of a machine whose best instruction set is `instructions`."""
        return cls(gb_s, gflops, *TIMES_F32[instructions])

    def times_f32(self, weights: str) -> float:
        """Return how many times as fast as f32 weights of this format are multiplied."""
        return {"f32": 1.0, "f16": 1.0, "bf16": self.bf16}.get(weights, self.integers)


# `vdpbf16ps` multiplies twice, `vpdpbusd` four times as many numbers as `vfmadd` (as on Zen 4 and 5;
# elsewhere shares may be too low). Without them bf16 is widened to f32, and 32 products of integers take
# `vpmaddubsw` and `vpmaddwd`, where f32 takes four `vfmadd`.
TIMES_F32 = {
    "avx512_bf16": (2, 4),
    "avx512_vnni": (1, 4),
    "avx512": (1, 2),
    "avx2_vnni": (1, 4),
    "avx2": (1, 2),
}


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

    def cell_bytes(self, *, is_int8: bool) -> int:
        """Bytes of K and V of one cell, in bf16 or in 8 bits with an f32 scale for each head."""
        head = self.d_head + 4 if is_int8 else self.d_head * 2
        return self.n_layers * 2 * self.n_kv_heads * head

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


def limited(name: str) -> Row | None:
    """Return the row of this name; None if it has no limit here."""
    kind, n, precision = name.split("-", 2)
    row = Row(kind, int(n), precision, engines={})
    return row if kind in ("decode", "prefill") and weights_of(row) in WEIGHT_BYTES else None


def shape_of(row: Row) -> Shape:
    """Return the row's model."""
    return EXPERTS if row.precision.startswith("experts-") else DENSE


def weights_of(row: Row) -> str:
    """Return the precision of its weights."""
    return "8bit" if row.precision in LONG else row.precision.removeprefix("experts-")


def step_s(row: Row, context: int, speed: Speed) -> float:
    """Return the least seconds of a decode step at this context."""
    shape, weights, n_streams = shape_of(row), weights_of(row), row.n
    cells = n_streams * context * shape.cell_bytes(is_int8=row.has_int8_cells)
    n_bytes = shape.n_read(n_streams) * WEIGHT_BYTES[weights] + shape.head_bytes(weights) + cells
    attention = 4 * shape.n_layers * shape.n_heads * shape.d_head * context / speed.bf16
    layers = 2 * shape.n_multiplied / speed.times_f32(weights)
    operations = n_streams * (layers + 2 * shape.n_head / speed.integers + attention)
    return max(n_bytes / speed.gb_s, operations / speed.gflops) / 1e9


def prompt_s(row: Row, speed: Speed) -> float:
    """Return the least seconds of a prompt. Only its last token needs the head."""
    shape, weights, n = shape_of(row), weights_of(row), row.n
    n_bytes = shape.n_read(n) * WEIGHT_BYTES[weights] + shape.head_bytes(weights)
    attention = 4 * shape.n_layers * shape.n_heads * shape.d_head * n * n / 2 / speed.bf16
    layers = n * 2 * shape.n_multiplied / speed.times_f32(weights)
    operations = layers + 2 * shape.n_head / speed.integers + attention
    return max(n_bytes / speed.gb_s, operations / speed.gflops) / 1e9


def limit_share(found: list[Round], engine: str) -> float | None:
    """Return the median share of the limit of an engine's rounds of a row; None if the row has no limit."""
    row = limited(found[0]["row"])
    if row is None:
        return None
    shares = []
    for each in found:
        if engine not in each["rates"] or "gflops" not in each:
            continue
        place = each["order"].index(engine)
        gb_s, gflops = ((each[key][place] + each[key][place + 1]) / 2 for key in ("gb_s", "gflops"))
        speed = Speed.of(gb_s, gflops, isa(each["machine"]))
        for context, rate in each["rates"][engine].items():
            least = step_s(row, int(context), speed) if row.kind == "decode" else prompt_s(row, speed)
            shares.append(least * rate / row.n)
    return statistics.median(shares) if shares else None


def least_share(row: str) -> float:
    """Return the share that a row should reach. One stream only reads."""
    if row.startswith("decode-1-"):
        return DECODE_1_LONG_AT_LEAST if row.removeprefix("decode-1-") in LONG else DECODE_1_AT_LEAST
    return OTHERS_AT_LEAST
