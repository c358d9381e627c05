"""FP8 and compressed-tensors checkpoints of a model, quantized by rounding to the nearest number.

Layouts: `crates/llaisys-core/src/load/folder/quantization/scaled.rs`. Matrices are `[outputs, inputs]`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
# By the name in a safetensors header.
Stored = tuple[str, NDArray[Any]]
# The numbers of E4M3 from 0 to 448, by their byte: exponent 0 has no leading one.
E4M3 = np.array(
    [(byte % 8 + (8 if byte >= 8 else 0)) / 8 * 2.0 ** (max(byte // 8, 1) - 7) for byte in range(127)]
)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized: its format, the strategy, and the type of its scales."""

    format: Literal["fp8", "float-quantized", "int-quantized", "pack-quantized"]
    strategy: Literal["tensor", "channel", "group", "block"]
    scales: Literal["F32", "BF16", "F16"] = "BF16"
    bits: int = 8
    symmetric: bool = True

    def __str__(self) -> str:
        zero = "" if self.symmetric else "-asymmetric"
        return f"{self.format}-{self.bits}-{self.strategy}-{self.scales}{zero}"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        return {"tensor": shape, "channel": (1, shape[1]), "group": (1, 64), "block": (128, 128)}[
            self.strategy
        ]

    def config(self) -> dict[str, object]:
        """Return the `quantization_config`."""
        if self.format == "fp8":
            block = [128, 128] if self.strategy == "block" else None
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        weights = {
            "num_bits": self.bits,
            "type": "float" if self.format == "float-quantized" else "int",
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": 64 if self.strategy == "group" else None,
            "block_structure": [128, 128] if self.strategy == "block" else None,
            "actorder": None,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return {"quant_method": "compressed-tensors", "format": self.format, "config_groups": groups}


def encode_e4m3(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the bytes of the nearest numbers, ties to even, at most 448."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    magnitudes = np.abs(values)
    low = np.searchsorted(middles, magnitudes, side="left")
    high = np.searchsorted(middles, magnitudes, side="right")
    byte = np.where(low % 2 == 0, low, high).astype(np.uint8)
    return np.where(np.signbit(values), byte | 0x80, byte).astype(np.uint8)


def _round(scales: NDArray[np.float64], dtype: str) -> tuple[Matrix, Stored]:
    """Return scales rounded to a type, and as they are stored."""
    if dtype == "F16":
        half = scales.astype(np.float16)
        return half.astype(np.float32), ("F16", half)
    whole = scales.astype(np.float32)
    if dtype == "F32":
        return whole, ("F32", whole)
    bits = (whole.view(np.uint32) + 0x8000) >> 16
    return (bits << 16).view(np.float32), ("BF16", bits.astype(np.uint16))


def _words(integers: NDArray[np.int64], bits: int) -> NDArray[np.uint32]:
    """Pack integers from 0 along the last axis, the first in the lowest bits; missing ones are zero."""
    per_word = 32 // bits
    padded = np.pad(integers, [(0, 0), (0, -integers.shape[1] % per_word)])
    parts = padded.reshape(len(integers), -1, per_word) << bits * np.arange(per_word)
    return np.asarray(parts.sum(-1), np.uint32)


def quantize(w: Matrix, scheme: Scheme) -> tuple[Matrix, dict[str, Stored]]:
    """Return the dequantized values of `w` in float32, and the tensors that store them, by the suffixes of
    their names."""
    n_rows, n_columns = scheme.block(w.shape)
    starts = [np.arange(0, size, step) for size, step in zip(w.shape, (n_rows, n_columns), strict=True)]
    places = np.ix_(np.arange(w.shape[0]) // n_rows, np.arange(w.shape[1]) // n_columns)

    def reduced(ufunc: np.ufunc, values: Matrix) -> NDArray[np.float64]:
        by_rows = ufunc.reduceat(values, starts[0], 0)
        return np.asarray(ufunc.reduceat(by_rows, starts[1], 1), np.float64)

    is_float = scheme.format in ("fp8", "float-quantized")
    half = 1 << (scheme.bits - 1)
    low = np.minimum(reduced(np.minimum, w), 0)
    high = np.maximum(reduced(np.maximum, w), 0)
    if scheme.symmetric:
        steps = np.maximum(high, -low) / (448 if is_float else half - 1)
    else:
        steps = (high - low) / (2 * half - 1)
    scales, stored_scales = _round(steps, scheme.scales)
    if scheme.strategy == "tensor":
        stored_scales = (stored_scales[0], stored_scales[1].reshape(1))
    name = "weight_scale_inv" if scheme.format == "fp8" else "weight_scale"
    stored: dict[str, Stored] = {name: stored_scales}
    spread = scales[places]
    if is_float:
        stored["weight"] = ("F8_E4M3", encode_e4m3(w / spread.astype(np.float64)))
        byte = stored["weight"][1]
        numbers = np.where(byte >> 7, -E4M3[byte & 127], E4M3[byte & 127]).astype(np.float32)
        return np.asarray(spread * numbers, np.float32), stored
    zeros = (
        np.zeros(scales.shape, np.int64)
        if scheme.symmetric
        else np.rint(-low / scales).astype(np.int64) - half
    )
    integers = (np.rint(w / spread).astype(np.int64) + zeros[places]).clip(-half, half - 1)
    if scheme.format == "int-quantized":
        stored["weight"] = ("I8", integers.astype(np.int8))
    else:
        stored["weight_packed"] = ("I32", _words(integers + half, scheme.bits))
        stored["weight_shape"] = ("I64", np.array(w.shape, np.int64))
        if not scheme.symmetric:
            stored["weight_zero_point"] = ("I32", _words(zeros.T + half, scheme.bits).T)
    return np.asarray(spread * (integers - zeros[places]), np.float32), stored


def write_safetensors(path: Path, tensors: dict[str, Stored]) -> None:
    """Write a safetensors file with types that NumPy does not have."""
    header, data = {}, bytearray()
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_scaled(folder: Path, plain: Path, source: Path, weights: dict[str, Matrix], scheme: Scheme) -> None:
    """Write two folders with `source`'s configuration: `folder` with quantized layer matrices, and `plain`
    with their dequantized values in float32."""
    values: dict[str, Stored] = {}
    stored: dict[str, Stored] = {}
    for name, w in weights.items():
        if name.endswith("_proj.weight"):
            left, parts = quantize(w, scheme)
            values[name] = ("F32", left)
            stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        else:
            values[name] = stored[name] = ("F32", w)
    config = json.loads((source / "config.json").read_text("utf-8"))
    for path, tensors, quantization in ((plain, values, None), (folder, stored, scheme.config())):
        path.mkdir()
        write_safetensors(path / "model.safetensors", tensors)
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}), "utf-8")
