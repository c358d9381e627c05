"""GPTQ and AWQ checkpoints of a model, quantized by rounding to the nearest of 16 steps in each group.

Layouts: `crates/llaisys-core/src/load/folder/quantization.rs`. Matrices are `[outputs, inputs]`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """The quantization scheme. `group_size` -1: whole rows."""

    method: str
    group_size: int
    symmetric: bool

    def config(self) -> dict[str, object]:
        """Return the `quantization_config`."""
        common = {"quant_method": self.method, "bits": 4, "group_size": self.group_size}
        if self.method == "awq":
            return common | {"zero_point": True, "version": "gemm"}
        return common | {"desc_act": False, "sym": self.symmetric}


def _pack(q: NDArray[np.int64], axis: int) -> NDArray[np.int32]:
    """Pack eight integers along `axis` into a word, the first in the lowest bits."""
    q = np.moveaxis(q, axis, -1)
    words = (q.reshape(*q.shape[:-1], -1, 8) << 4 * np.arange(8)).sum(-1)
    return np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32).copy()


def quantize(w: Matrix, scheme: Scheme) -> tuple[Matrix, dict[str, NDArray[np.generic]]]:
    """Return the dequantized values of `w`, and the tensors that store them, by the suffixes of their
    names."""
    n_columns = w.shape[1]
    size = n_columns if scheme.group_size == -1 else scheme.group_size
    group = np.arange(n_columns) // size
    starts = np.arange(0, n_columns, size)
    if scheme.symmetric:
        scales = np.maximum.reduceat(np.abs(w), starts, 1) / 7
        zeros = np.full(scales.shape, 8)
    else:
        low = np.minimum(np.minimum.reduceat(w, starts, 1), 0)
        scales = (np.maximum(np.maximum.reduceat(w, starts, 1), 0) - low) / 15
        zeros = np.rint(-low / scales).astype(np.int64)
    half = scales.astype(np.float16)
    scales = half.astype(np.float32)[:, group]
    q = (np.rint(w / scales).astype(np.int64) + zeros[:, group]).clip(0, 15)
    values = scales * (q - zeros[:, group])
    stored = {"scales": half.T.copy()}
    if scheme.method == "gptq":
        stored["qweight"] = _pack(q.T, 0)
        stored["qzeros"] = (_pack(zeros.T, 1).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        stored["g_idx"] = group.astype(np.int32)
    else:
        # Integer i of a word is output 8 j + AWQ_ORDER[i].
        shuffled = np.arange(len(w)).reshape(-1, 8)[:, AWQ_ORDER].ravel()
        stored["qweight"], stored["qzeros"] = _pack(q[shuffled].T, 1), _pack(zeros[shuffled].T, 1)
    return values.astype(np.float32), stored


def write_quantized(
    folder: Path, source: Path, weights: dict[str, Matrix], scheme: Scheme
) -> dict[str, Matrix]:
    """Write `weights` with quantized layer matrices, and `source`'s configuration. Return the dequantized
    weights."""
    left, stored = {}, {}
    for name, w in weights.items():
        if not name.endswith("_proj.weight"):
            left[name] = stored[name] = w
            continue
        left[name], parts = quantize(w, scheme)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{ending}": part for ending, part in parts.items()}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = scheme.config()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return left
