"""GGUF files with random blocks in the shapes of real models: experts, a hybrid, dense ones to load.

usage: peers_shapes.py FOLDER [NAME ...]

Values are drawn as quantized blocks, so that a file of 5 GB takes seconds. The speed of loading and of a
dense model does not depend on them. Routers are random too, so tokens spread over all experts. Existing files
are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

Q4_0, Q8_0, F32 = (
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.F32,
)
Kind = gguf.GGMLQuantizationType

# The benches draw tokens below 49000. A head of this width is as large a part of the six layers below as that
# of 151936 tokens is of the 48 layers of Qwen3-30B-A3B.
VOCAB = 49152


class File:
    """A GGUF file in the making: matrices of one type, vectors and small matrices in F32."""

    def __init__(self, path: Path, architecture: str, kind: Kind) -> None:
        self.path, self.kind = path, kind
        self.rng = np.random.Generator(np.random.PCG64(0))
        self.writer = gguf.GGUFWriter(f"{path}.part", architecture)

    def key(self, name: str, value: float) -> None:
        """Add a key of the architecture."""
        add = self.writer.add_float32 if isinstance(value, float) else self.writer.add_uint32
        add(f"{self.writer.arch}.{name}", value)

    def matrix(self, name: str, *shape: int, kind: Kind | None = None, gain: float = 1.0) -> None:
        """Add random blocks, `[rows..., inputs]`, of values with the deviation `gain` / sqrt(inputs)."""
        kind = kind or self.kind
        length, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = self.rng.integers(0, 256, (*shape[:-1], shape[-1] // length, size), np.uint8)
        deviation = {Q4_0: 4.6, Q8_0: 74.0}[kind]  # of the random integers
        scale = np.array([gain / (deviation * shape[-1] ** 0.5)], np.float16)
        # Scales of both signs: integers of 4 bits are -0.5 on average, and a common sign would make all
        # tokens alike.
        sign = blocks[..., 1] & 0x80
        blocks[..., :2] = scale.view(np.uint8)
        blocks[..., 1] |= sign
        self.writer.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def small(self, name: str, *shape: int, offset: float = 0.0) -> None:
        """Add F32 values around `offset`."""
        values = self.rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        self.writer.add_tensor(name, values * np.float32(not offset) + np.float32(offset))

    def norm(self, name: str, width: int) -> None:
        """Add a norm's weights, all 1."""
        self.small(f"{name}.weight", width, offset=1.0)

    def finish(self, sizes: dict[str, float], vocab_size: int) -> None:
        """Add keys, the tokenizer, embedding and head, and write the file."""
        for name, value in sizes.items():
            self.key(name, value)
        d_model = int(sizes["embedding_length"])
        # 8 bits in every file, as in the dense model of the comparison. Embeddings are as large as the
        # outputs of layers: hidden states, and with them the chosen experts, differ from token to token.
        self.matrix("token_embd", vocab_size, d_model, kind=Q8_0, gain=d_model**0.5)
        self.matrix("output", vocab_size, d_model, kind=Q8_0)
        self.norm("output_norm", d_model)
        add = self.writer
        add.add_file_type({Q4_0: 2, Q8_0: 7}[self.kind])
        add.add_tokenizer_model("gpt2")
        add.add_tokenizer_pre("qwen2")
        add.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, vocab_size))])
        add.add_token_types([gguf.TokenType.NORMAL] * (vocab_size - 1) + [gguf.TokenType.CONTROL])
        add.add_token_merges(["a b"])
        add.add_eos_token_id(vocab_size - 1)
        add.add_bos_token_id(vocab_size - 1)
        add.write_header_to_file()
        add.write_kv_data_to_file()
        add.write_tensors_to_file()
        add.close()
        Path(f"{self.path}.part").rename(self.path)


def attention(file: File, layer: int, d_model: int, q: int, kv: int) -> None:
    """Add the projections of an attention layer with `q` query outputs and `kv` key outputs."""
    for name, shape in (
        ("attn_q", (q, d_model)),
        ("attn_k", (kv, d_model)),
        ("attn_v", (kv, d_model)),
        ("attn_output", (d_model, q)),
    ):
        file.matrix(f"blk.{layer}.{name}", *shape)


def mlp(file: File, layer: int, d_model: int, d_ff: int) -> None:
    """Add a dense feed-forward block."""
    file.matrix(f"blk.{layer}.ffn_gate", d_ff, d_model)
    file.matrix(f"blk.{layer}.ffn_up", d_ff, d_model)
    file.matrix(f"blk.{layer}.ffn_down", d_model, d_ff)


def experts(path: Path, kind: Kind) -> None:
    """Write six layers of Qwen3-30B-A3B: 128 experts, of which a token uses 8."""
    file, n_layers, d_model, d_ff, n = File(path, "qwen3moe", kind), 6, 2048, 768, 128
    for layer in range(n_layers):
        file.norm(f"blk.{layer}.attn_norm", d_model)
        attention(file, layer, d_model, 32 * 128, 4 * 128)
        file.norm(f"blk.{layer}.attn_q_norm", 128)
        file.norm(f"blk.{layer}.attn_k_norm", 128)
        file.norm(f"blk.{layer}.ffn_norm", d_model)
        file.small(f"blk.{layer}.ffn_gate_inp.weight", n, d_model)
        file.matrix(f"blk.{layer}.ffn_gate_exps", n, d_ff, d_model)
        file.matrix(f"blk.{layer}.ffn_up_exps", n, d_ff, d_model)
        file.matrix(f"blk.{layer}.ffn_down_exps", n, d_model, d_ff)
    sizes = {
        "block_count": n_layers,
        "context_length": 40960,
        "embedding_length": d_model,
        "feed_forward_length": 6144,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "expert_count": n,
        "expert_used_count": 8,
        "expert_feed_forward_length": d_ff,
    }
    file.finish(sizes, VOCAB)


def hybrid(path: Path, kind: Kind) -> None:
    """Write Qwen3.5-0.8B: 18 layers of gated delta nets and 6 of attention, with a smaller vocabulary."""
    file, n_layers, d_model, d_ff = File(path, "qwen35", kind), 24, 1024, 3584
    n_heads, d_head = 16, 128  # of the delta nets; as many of keys as of values
    width = n_heads * d_head
    for layer in range(n_layers):
        file.norm(f"blk.{layer}.attn_norm", d_model)
        file.norm(f"blk.{layer}.post_attention_norm", d_model)
        if layer % 4 == 3:
            attention_heads = 8 * 256
            file.matrix(f"blk.{layer}.attn_q", 2 * attention_heads, d_model)
            file.matrix(f"blk.{layer}.attn_k", 2 * 256, d_model)
            file.matrix(f"blk.{layer}.attn_v", 2 * 256, d_model)
            file.matrix(f"blk.{layer}.attn_output", d_model, attention_heads)
            file.norm(f"blk.{layer}.attn_q_norm", 256)
            file.norm(f"blk.{layer}.attn_k_norm", 256)
        else:
            file.matrix(f"blk.{layer}.attn_qkv", 3 * width, d_model)
            file.matrix(f"blk.{layer}.attn_gate", width, d_model)
            file.matrix(f"blk.{layer}.ssm_beta", n_heads, d_model, kind=Q8_0)
            file.matrix(f"blk.{layer}.ssm_alpha", n_heads, d_model, kind=Q8_0)
            file.small(f"blk.{layer}.ssm_conv1d.weight", 3 * width, 4)
            file.small(f"blk.{layer}.ssm_a", n_heads, offset=-1.0)
            file.small(f"blk.{layer}.ssm_dt.bias", n_heads)
            file.norm(f"blk.{layer}.ssm_norm", d_head)
            file.matrix(f"blk.{layer}.ssm_out", d_model, width)
        mlp(file, layer, d_model, d_ff)
    file.writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    sizes = {
        "block_count": n_layers,
        "context_length": 32768,
        "embedding_length": d_model,
        "feed_forward_length": d_ff,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": d_head,
        "ssm.group_count": n_heads,
        "ssm.time_step_rank": n_heads,
        "ssm.inner_size": width,
    }
    file.finish(sizes, VOCAB)


def dense(path: Path, kind: Kind, *, n_layers: int, d_model: int, d_ff: int, heads: tuple[int, int]) -> None:
    """Write a Llama with heads of 128: (query heads, key heads)."""
    file, (n_heads, n_kv_heads) = File(path, "llama", kind), heads
    for layer in range(n_layers):
        file.norm(f"blk.{layer}.attn_norm", d_model)
        attention(file, layer, d_model, n_heads * 128, n_kv_heads * 128)
        file.norm(f"blk.{layer}.ffn_norm", d_model)
        mlp(file, layer, d_model, d_ff)
    sizes = {
        "block_count": n_layers,
        "context_length": 8192,
        "embedding_length": d_model,
        "feed_forward_length": d_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "rope.dimension_count": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }
    file.finish(sizes, VOCAB)


def dense_3b(path: Path, kind: Kind) -> None:
    """Write the layers of Llama-3.2-3B."""
    dense(path, kind, n_layers=28, d_model=3072, d_ff=8192, heads=(24, 8))


def dense_8b(path: Path, kind: Kind) -> None:
    """Write the layers of Llama-3.1-8B."""
    dense(path, kind, n_layers=32, d_model=4096, d_ff=14336, heads=(32, 8))


MODELS: dict[str, tuple[Callable[[Path, Kind], None], Kind]] = {
    "experts-q4_0": (experts, Q4_0),
    "experts-q8_0": (experts, Q8_0),
    "hybrid-q4_0": (hybrid, Q4_0),
    "hybrid-q8_0": (hybrid, Q8_0),
    "dense-3b-q4_0": (dense_3b, Q4_0),
    "dense-3b-q8_0": (dense_3b, Q8_0),
    "dense-8b-q4_0": (dense_8b, Q4_0),
}


def main() -> None:
    """Write the missing files."""
    folder, *names = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in names or MODELS:
        path = Path(folder) / f"{name}.gguf"
        if not path.exists():
            write, kind = MODELS[name]
            write(path, kind)


if __name__ == "__main__":
    main()
