"""Copies of GGUF files with other tensors: the bytes of the metadata stay unchanged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 32
Matrix = NDArray[np.float32]


def read_tensors(path: Path) -> dict[str, Matrix]:
    """Read every tensor of a file in float32, `[rows, columns]` or `[n]`."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in tensors}


def write_like(source: Path, target: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Path:
    """Write the metadata of `source` and `tensors`; return `target`.

    `tensors`: name -> GGUF type, shape (slowest dimension first), data.
    """
    first = gguf.GGUFReader(source).tensors[0].field.offset
    head = bytearray(source.read_bytes()[:first])
    head[8:16] = struct.pack("<Q", len(tensors))
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        type_id = gguf.GGMLQuantizationType[dtype].value
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *reversed(shape), type_id, offset)
        offset += len(data) + -len(data) % ALIGNMENT
    with target.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for _, _, data in tensors.values():
            file.write(data + bytes(-len(data) % ALIGNMENT))
    return target
