"""FP8 and compressed-tensors folders of a golden model against plain folders with the dequantized values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from parity.checkpoints import read_weights
from parity.scaled_folders import E4M3, Scheme, encode_e4m3, write_scaled
from parity.test_packed_bytes import check
from runner import Runner

# 128 and 320 columns: the last block of 128 has only half the length.
SOURCE = Path(__file__).parents[1] / "data" / "goldens" / "qwen2-f16"
SCHEMES = [
    Scheme("fp8", "block", "F32"),
    Scheme("fp8", "block", "BF16"),
    Scheme("fp8", "tensor", "BF16"),
    Scheme("fp8", "channel", "F32"),
    Scheme("float-quantized", "channel"),
    Scheme("float-quantized", "tensor", "F16"),
    Scheme("float-quantized", "block"),
    Scheme("int-quantized", "channel"),
    Scheme("int-quantized", "tensor", "F32"),
    Scheme("pack-quantized", "channel"),
    Scheme("pack-quantized", "group", "F16"),
    Scheme("pack-quantized", "group", bits=4),
    Scheme("pack-quantized", "group", "F32", bits=4),
    Scheme("pack-quantized", "channel", "F16", bits=4),
    Scheme("pack-quantized", "group", bits=4, symmetric=False),
    Scheme("pack-quantized", "channel", "F32", bits=4, symmetric=False),
]
# As in test_int4_folders.py: activations are rounded to 8 bits. The rounding of FP8 to integers, by at most
# 1/128 of the largest of 32 weights, adds an eighth to it.
AUTO_RMS = 0.05


def rms(error: NDArray[np.float32], of: NDArray[np.float32]) -> float:
    return float(np.sqrt((error**2).mean() / (of**2).mean()))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scaled_folder(scheme: Scheme, tmp_path: Path) -> None:
    """In float32, a quantized folder is the plain one, bit for bit. `auto` adds only its rounding."""
    folder, plain = tmp_path / "model", tmp_path / "plain"
    write_scaled(folder, plain, SOURCE, read_weights(SOURCE / "model.safetensors"), scheme)
    tokens = np.random.default_rng(1).integers(0, 600, 60).tolist()
    logits, ids = {}, {}
    for name, path, dtype in (
        ("original", SOURCE, "float32"),
        ("plain", plain, "float32"),
        ("float32", folder, "float32"),
        ("bfloat16 plain", plain, "bfloat16"),
        ("bfloat16", folder, "bfloat16"),
        ("auto", folder, "auto"),
    ):
        with Runner(path, dtype=dtype) as runner:
            logits[name] = runner.forward(tokens)[0]
            ids[name] = runner.greedy(tokens[:20], 20)
    lost = rms(logits["plain"] - logits["original"], logits["original"])
    added = rms(logits["auto"] - logits["plain"], logits["plain"])
    whole = rms(logits["auto"] - logits["original"], logits["original"])
    print(f"{scheme}: rms error of the checkpoint {lost:.4f}, added by auto {added:.4f}, of both {whole:.4f}")
    for name in ("float32", "bfloat16"):
        other = "plain" if name == "float32" else "bfloat16 plain"
        assert np.array_equal(logits[name], logits[other])
        assert ids[name] == ids[other]
    assert added <= AUTO_RMS


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_fp8_can_be_quantized(mode: str, tmp_path: Path) -> None:
    """As a plain folder with the same values, bit for bit."""
    write_scaled(
        tmp_path / "fp8", tmp_path / "plain", SOURCE, read_weights(SOURCE / "model.safetensors"), SCHEMES[0]
    )
    tokens = list(range(40))
    logits = []
    for name in ("fp8", "plain"):
        with Runner(tmp_path / name, dtype=mode) as runner:
            logits.append(runner.forward(tokens)[0])
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize("scheme", SCHEMES[:1] + SCHEMES[7:8] + SCHEMES[11:13], ids=str)
def test_packed_size_is_predicted(scheme: Scheme, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_scaled(folder, tmp_path / "plain", SOURCE, read_weights(SOURCE / "model.safetensors"), scheme)
    check(folder, is_plain=scheme.format == "fp8")


def test_encoding() -> None:
    assert np.array_equal(encode_e4m3(E4M3), np.arange(127))
    # Halfway between two numbers, and beyond the largest.
    values = np.array([1.0625, 1.1875, -1.0625, 1e9, 2.0**-10, 3 * 2.0**-10])
    assert encode_e4m3(values).tolist() == [0x38, 0x3A, 0xB8, 0x7E, 0x00, 0x02]
