"""Mixed GGUF files such as Q4_K_M of SmolLM2: their loss compared with the same weights in float32.

The reference is a file of the weights that the gguf package dequantizes, so errors of the core's reader show
as well. SmolLM2's matrices have 576 columns, except `ffn_down` (1536): as llama.cpp
does, a K type that does not divide a row falls back to a type with blocks of 32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from llaisys.text.tokenizer import load_tokenizer
from parity.gguf_files import read_tensors, write_like
from parity.k_quants import quantize
from runner import Runner

TEXT = Path(__file__).parents[1] / "data" / "text" / "mixed.txt"
N_LAYERS = 30
# Four windows: 2,000 tokens and more.
WINDOW, N_WINDOWS = 512, 4
# Tokens whose logits must be equal to the last bit; a row's bits do not depend on the rows after it.
EXACT = 64
# Types of (most matrices, the more sensitive half of attn_v and ffn_down), and of the embedding.
MIXES = {
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q2_K": ("Q2_K", "Q3_K", "Q6_K"),
}
# llama.cpp's fallback for rows that are not whole super-blocks.
FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def is_sensitive(name: str) -> bool:
    """Return llama.cpp's choice: the first and the last eighth of the layers, and each third in between."""
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    layer, eighth = int(name.split(".")[1]), N_LAYERS // 8
    return layer < eighth or layer >= N_LAYERS - eighth or (layer - eighth) % 3 == 2


def type_of(mix: str, name: str, n_columns: int) -> str:
    most, sensitive, embedding = MIXES[mix]
    dtype = embedding if name == "token_embd.weight" else sensitive if is_sensitive(name) else most
    return dtype if n_columns % 256 == 0 else FALLBACK[dtype]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return Path(resolve_model("smollm2").path)


@pytest.fixture(scope="module")
def windows(smollm2: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(inspect_model(str(smollm2)))
    ids = tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    return [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(N_WINDOWS)]


def logits(path: Path, dtype: str, windows: list[list[int]]) -> Iterator[NDArray[np.float32]]:
    """Yield the logits `[tokens, vocab]` of each window."""
    with Runner(path, dtype=dtype) as runner:
        for window in windows:
            yield runner.forward(window)[0]


def logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def write_mix(folder: Path, mix: str, smollm2: Path) -> tuple[Path, Path, set[str]]:
    """Write two files, quantized and the same values in float32; return them and the types of the first."""
    packed, plain, types = {}, {}, set()
    for name, values in read_tensors(smollm2).items():
        if values.ndim == 1:
            packed[name] = plain[name] = ("F32", values.shape, values.tobytes())
            continue
        dtype = type_of(mix, name, values.shape[-1])
        types.add(dtype)
        blocks = quantize(values, dtype)
        packed[name] = (dtype, values.shape, blocks.tobytes())
        again = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])
        plain[name] = ("F32", values.shape, again.astype(np.float32).tobytes())
    mixed = write_like(smollm2, folder / "mixed.gguf", packed)
    return mixed, write_like(smollm2, folder / "float32.gguf", plain), types


@pytest.mark.long
@pytest.mark.timeout(900)  # four passes over a model, perhaps on a busy machine
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_files_stay_close_to_float32(mix: str, smollm2: Path, windows: list[list[int]]) -> None:
    kl, same, n_tokens = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        mixed, reference, types = write_mix(Path(folder), mix, smollm2)
        wanted = list(logits(reference, "float32", windows))
        # The float32 mode uses exactly the values of the gguf package.
        [exact] = logits(mixed, "float32", [windows[0][:EXACT]])
        assert np.array_equal(exact, wanted[0][:EXACT])
        for want, got in zip(
            map(logprobs, wanted), map(logprobs, logits(mixed, "auto", windows)), strict=True
        ):
            kl += (np.exp(want) * (want - got)).sum()
            same += (want.argmax(-1) == got.argmax(-1)).sum()
            n_tokens += len(want)
    kl, same = kl / n_tokens, same / n_tokens
    print(f"{mix} {sorted(types)}: {n_tokens} tokens, mean KL {kl:.6f}, top-1 {same:.4f}")
    assert n_tokens >= 2000
    assert kl <= 0.005
