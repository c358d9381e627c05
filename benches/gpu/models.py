"""The checkpoints of the phases: random ones of known shapes, and the first layers of SmolLM2.

Random weights are sufficient for speed and for shapes. Their values come from a seed, so that both engines of
a comparison read the same file. `smollm2-8` has real weights, which prepare.py packed as their original Q4_1
blocks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from common import Skip, is_importable
from numpy.typing import NDArray

Bits = NDArray[np.uint16]

BF16_ONE = 0x3F80
BLOCK, BLOCK_BYTES = 32, 20  # Q4_1: scale and minimum in f16, 32 codes of 4 bits
PACKED = "smollm2-8.packed.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen2 checkpoint. Source of `QWEN`: config.json of Qwen/Qwen2.5-0.5B, -1.5B and -7B."""

    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    is_tied: bool
    max_len: int = 32768
    # Standard deviation of matrices and biases: Qwen2's `initializer_range`.
    deviation: float = 0.02
    seed: int = 0

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in bf16."""
        return self.n_layers * self.n_kv_heads * self.d_head * 2 * 2

    @property
    def n_step_weights(self) -> int:
        """Number of weights in the products of a step: all except an embedding that is not also the head."""
        attention = self.d_model * self.d_head * (2 * self.n_heads + 2 * self.n_kv_heads)
        return self.n_layers * (attention + 3 * self.d_model * self.d_ff) + self.vocab_size * self.d_model

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": self.max_len,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "bos_token_id": None,
            "eos_token_id": self.vocab_size - 1,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, in the file's order."""
        q, kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        yield "model.embed_tokens.weight", (self.vocab_size, self.d_model)
        for layer in range(self.n_layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", (self.d_model,)
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                yield f"{at}.self_attn.{name}_proj.weight", (width, self.d_model)
                yield f"{at}.self_attn.{name}_proj.bias", (width,)
            yield f"{at}.self_attn.o_proj.weight", (self.d_model, q)
            yield f"{at}.post_attention_layernorm.weight", (self.d_model,)
            for name in ("gate", "up"):
                yield f"{at}.mlp.{name}_proj.weight", (self.d_ff, self.d_model)
            yield f"{at}.mlp.down_proj.weight", (self.d_model, self.d_ff)
        yield "model.norm.weight", (self.d_model,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab_size, self.d_model)


QWEN = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151_936, True),
    "7B": Shape(3584, 18_944, 28, 28, 4, 152_064, False),
}
# For dry runs: heads of 64, the narrowest that the kernels support. Such few and narrow layers change a token
# only with larger weights. With this seed the best two logits of phase 2's dry run differ by 5 ulp or more.
TINY = Shape(128, 256, 2, 2, 1, 600, True, 512, 0.1, 17)


def random_model(out: Path, inputs: Path, name: str, shape: Shape) -> Path:
    """Return the folder `out/models/name` with random weights of `shape`, and create it if it does not exist.

    Matrices and biases have a normal distribution; norms are 1.
    """
    folder = out / "models" / name
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(inputs / "qwen2-tokenizer", folder)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1), "utf-8")
    draw = (_on_gpu if is_importable("torch") else _on_cpu)(shape.seed, shape.deviation)
    tensors = list(shape.tensors())
    with (folder / "part").open("wb") as file:
        write_header(file, tensors)
        for tensor, dims in tensors:
            if tensor.endswith("norm.weight"):
                np.full(dims, BF16_ONE, np.uint16).tofile(file)
            else:
                draw(file, dims)
    (folder / "part").rename(folder / "model.safetensors")
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer. Raises Skip if the inputs do not exist."""
    for name in TOKENIZER:
        if not (source / name).exists():
            raise Skip(f"{source / name} does not exist: run prepare.py")
        shutil.copy(source / name, folder / name)


def write_header(file: BinaryIO, tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    """Write the header of a safetensors file with these bf16 tensors, in this order (the format's README)."""
    header, offset = {}, 0
    for name, dims in tensors:
        end = offset + 2 * math.prod(dims)
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def read_header(file: BinaryIO) -> dict[str, Any]:
    """Read the header of a safetensors file, up to the first byte of data."""
    header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header


def to_bf16(values: NDArray[np.float32]) -> Bits:
    """Round to bf16, to the nearest with ties to even. There must be no NaN."""
    bits = values.view(np.uint32)
    rounded: Bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def _on_cpu(seed: int, deviation: float) -> Any:
    rng = np.random.default_rng(seed)

    def draw(file: BinaryIO, dims: tuple[int, ...]) -> None:
        to_bf16(rng.standard_normal(dims, np.float32) * np.float32(deviation)).tofile(file)

    return draw


def _on_gpu(seed: int, deviation: float) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(seed)

    def draw(file: BinaryIO, dims: tuple[int, ...]) -> None:
        values = torch.empty(dims, dtype=torch.bfloat16, device=device)
        values.normal_(0, deviation, generator=random)
        values.view(torch.int16).cpu().numpy().tofile(file)

    return draw


def smollm2(out: Path, inputs: Path) -> Path:
    """Return the folder `out/models/smollm2-8`: the first 8 layers of SmolLM2-135M-Instruct in bf16.

    They are unpacked if the folder does not exist.
    """
    folder = out / "models" / "smollm2-8"
    if (folder / "model.safetensors").exists():
        return folder
    packed = inputs / PACKED
    if not packed.exists():
        raise Skip(f"{packed} does not exist: run prepare.py")
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(inputs / "smollm2-tokenizer", folder)
    shutil.copy(inputs / "smollm2-config.json", folder / "config.json")
    with packed.open("rb") as file, (folder / "part").open("wb") as target:
        header = read_header(file)
        header.pop("__metadata__", None)
        tensors = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        shapes = []
        for name, entry in tensors:
            rows, *columns = entry["shape"]
            packed_columns = [columns[0] // BLOCK_BYTES * BLOCK] if entry["dtype"] == "U8" else columns
            shapes.append((name, (rows, *packed_columns)))
        write_header(target, shapes)
        for (_, entry), (_, dims) in zip(tensors, shapes, strict=True):
            first, end = entry["data_offsets"]
            data = file.read(end - first)
            values = unpack(data) if entry["dtype"] == "U8" else np.frombuffer(data, np.float32)
            to_bf16(values.reshape(dims)).tofile(target)
    (folder / "part").rename(folder / "model.safetensors")
    return folder


def unpack(data: bytes) -> NDArray[np.float32]:
    """Return the values of Q4_1 blocks: `code * scale + minimum`, low halves of the bytes first
    (ggml-quants.c).
    """
    blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES)
    scale, smallest = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
    values: NDArray[np.float32] = codes * scale + smallest
    return values
