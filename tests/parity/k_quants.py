"""Quantizers of types that the gguf package cannot quantize: plain rounding without a search for scales.

Layouts: ggml-common.h, as in `crates/llaisys-core/src/quant/`. `x` is float32 `[blocks, 256]` (IQ4_NL:
`[blocks, 32]`), the result uint8 `[blocks, block_bytes]`.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


def quantize(values: F32, name: str) -> U8:
    """Return a matrix as rows of bytes of the GGUF type `name`."""
    dtype = gguf.GGMLQuantizationType[name]
    if name not in _OWN:
        return np.asarray(gguf.quants.quantize(values, dtype)).view(np.uint8)
    block_len, _ = gguf.GGML_QUANT_SIZES[dtype]
    blocks = _OWN[name](values.reshape(-1, block_len))
    return blocks.reshape(len(values), -1)


def _f16(x: F32) -> tuple[F32, U8]:
    """Return `x` `[blocks]` rounded to f16, and its bytes `[blocks, 2]`."""
    half = x.astype("<f2")
    return half.astype(np.float32), half.view(np.uint8).reshape(-1, 2)


def _steps(x: F32, unit: F32, low: int, high: int) -> NDArray[np.int64]:
    """Return the nearest multiples of `unit`, or 0 where it is 0."""
    q = np.divide(x, unit, out=np.zeros_like(x), where=unit != 0)
    return np.rint(q).clip(low, high).astype(np.int64)


def _with_min(x: F32, bits: int, scale_max: int) -> tuple[NDArray[np.int64], ...]:
    """Quantize `x` `[n, groups, len]` as `d * scale * q - dmin * minimum`.

    Return scales, minima, q, and the bytes of d and dmin.
    """
    low = -np.minimum(x.min(-1), 0)
    step = (x.max(-1).clip(0) + low) / (2**bits - 1)
    d, d_bytes = _f16(step.max(-1) / scale_max)
    dmin, dmin_bytes = _f16(low.max(-1) / scale_max)
    scale = _steps(step, d[:, None], 0, scale_max)
    minimum = _steps(low, dmin[:, None], 0, scale_max)
    base = (dmin[:, None] * minimum)[..., None].astype(np.float32)
    unit = (d[:, None] * scale)[..., None].astype(np.float32)
    return scale, minimum, _steps(x + base, unit, 0, 2**bits - 1), d_bytes, dmin_bytes


def _signed(x: F32, bits: int, scale_max: int) -> tuple[NDArray[np.int64], ...]:
    """Quantize `x` `[n, groups, len]` as `d * scale * q`; return scales, q, and the bytes of d."""
    top = 2 ** (bits - 1)
    step = np.abs(x).max(-1) / (top - 1)
    d, d_bytes = _f16(step.max(-1) / scale_max)
    scale = _steps(step, d[:, None], 0, scale_max)
    unit = (d[:, None] * scale)[..., None].astype(np.float32)
    return scale, _steps(x, unit, -top, top - 1), d_bytes


def _low_bits(q: NDArray[np.int64], bits: int, run: int) -> NDArray[np.int64]:
    """Pack `[n, 256]` integers of `bits` bits; a run of bytes has `8 / bits` parts of `run` elements."""
    parts = q.reshape(len(q), -1, 8 // bits, run)
    shifts = bits * np.arange(8 // bits)[:, None]
    return ((parts & (2**bits - 1)) << shifts).sum(-2).reshape(len(q), -1)


def _plane(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack `[n, 256]` bits: bit `i` of byte `j` is element `32 * i + j`."""
    return (bits.reshape(-1, 8, 32) << np.arange(8)[:, None]).sum(1)


def _bytes(*parts: NDArray[np.integer]) -> U8:
    return np.concatenate([part.astype(np.uint8) for part in parts], -1)


def _q2_k(x: F32) -> U8:
    scale, minimum, q, d, dmin = _with_min(x.reshape(-1, 16, 16), 2, 15)
    return _bytes(scale | minimum << 4, _low_bits(q.reshape(len(q), 256), 2, 32), d, dmin)


def _q3_k(x: F32) -> U8:
    scale, q, d = _signed(x.reshape(-1, 16, 16), 3, 31)
    scale, q = scale + 32, q.reshape(-1, 256) + 4
    low = scale[:, :8] & 15 | (scale[:, 8:] & 15) << 4
    high = (scale.reshape(-1, 4, 4) >> 4 << 2 * np.arange(4)[:, None]).sum(1)
    return _bytes(_plane(q >> 2), _low_bits(q, 2, 32), low, high, d)


def _scales(scale: NDArray[np.int64], minimum: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pack eight pairs of 6 bits into 12 bytes."""
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = minimum[:, :4] | minimum[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4], -1)


def _q4_k(x: F32) -> U8:
    scale, minimum, q, d, dmin = _with_min(x.reshape(-1, 8, 32), 4, 63)
    return _bytes(d, dmin, _scales(scale, minimum), _low_bits(q.reshape(len(q), 256), 4, 32))


def _q5_k(x: F32) -> U8:
    scale, minimum, q, d, dmin = _with_min(x.reshape(-1, 8, 32), 5, 63)
    q = q.reshape(-1, 256)
    return _bytes(d, dmin, _scales(scale, minimum), _plane(q >> 4), _low_bits(q, 4, 32))


def _q6_k(x: F32) -> U8:
    scale, q, d = _signed(x.reshape(-1, 16, 16), 6, 127)
    q = q.reshape(-1, 256) + 32
    return _bytes(_low_bits(q, 4, 64), _low_bits(q >> 4, 2, 32), scale, d)


def _iq4_nl(x: F32) -> U8:
    table = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    d, d_bytes = _f16(np.abs(x).max(-1) / 113)
    steps = np.divide(x, d[:, None], out=np.zeros_like(x), where=d[:, None] != 0)
    q = np.abs(steps[..., None] - table).argmin(-1)
    return _bytes(d_bytes, q[:, :16] | q[:, 16:] << 4)


_OWN: dict[str, Callable[[F32], U8]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
