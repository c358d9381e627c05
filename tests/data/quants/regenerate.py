"""Makes the vectors of this folder: random blocks of each GGUF type, their values by the PyPI package gguf.

`python tests/data/quants/regenerate.py`. A file is `N_VALUES` elements in blocks, then the values in float32,
little endian. Every byte of a block is random, but f16 numbers are finite (subnormal ones among them).
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_VALUES = 2048
# Where the f16 numbers of a block lie.
HALVES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "IQ4_NL": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
}


def main() -> None:
    rng = np.random.default_rng(7)
    for name, halves in HALVES.items():
        dtype = gguf.GGMLQuantizationType[name]
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
        blocks = rng.integers(0, 256, (N_VALUES // block_len, block_bytes), np.uint8)
        for at in halves:
            # An exponent of all ones would be an infinity or a NaN.
            blocks[:, at + 1] = np.where(
                blocks[:, at + 1] & 0x7C == 0x7C, blocks[:, at + 1] ^ 4, blocks[:, at + 1]
            )
        if name == "MXFP4":
            # An exponent in the first byte: products stay finite, and scales normal numbers of f32.
            blocks[:, 0] = rng.integers(2, 253, len(blocks), np.uint8)
        values = gguf.quants.dequantize(blocks, dtype)
        assert values.size == N_VALUES
        assert np.isfinite(values).all()
        data = blocks.tobytes() + values.astype("<f4").tobytes()
        (Path(__file__).parent / f"{name.lower()}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
