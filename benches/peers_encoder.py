"""An encoder of BERT's shape with random weights, for each engine: 12 layers of 768, as bge-base has.

usage: peers_encoder.py FOLDER

Writes `encoder` (a Hugging Face folder in BF16), `encoder-bf16.gguf` and `encoder-q8_0.gguf` with the same
values. The tokenizer is that of the test data, so the vocabulary has 600 tokens. Existing files are kept.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from peers_models import write_safetensors

SOURCE = Path(__file__).parents[1] / "tests" / "data" / "goldens" / "bert_embed_f32"
N_LAYERS, D, D_FF, N_HEADS, N_POSITIONS, VOCAB = 12, 768, 3072, 12, 512, 600
CONFIG = json.loads((SOURCE / "config.json").read_text("utf-8")) | {
    "dtype": "bfloat16",
    "hidden_size": D,
    "intermediate_size": D_FF,
    "max_position_embeddings": N_POSITIONS,
    "num_attention_heads": N_HEADS,
    "num_hidden_layers": N_LAYERS,
}
# Names in a folder and in a GGUF file, and the shape.
EMBEDDINGS = [
    ("embeddings.word_embeddings.weight", "token_embd.weight", (VOCAB, D)),
    ("embeddings.position_embeddings.weight", "position_embd.weight", (N_POSITIONS, D)),
    ("embeddings.token_type_embeddings.weight", "token_types.weight", (2, D)),
    ("embeddings.LayerNorm.weight", "token_embd_norm.weight", (D,)),
    ("embeddings.LayerNorm.bias", "token_embd_norm.bias", (D,)),
]
PROJECTIONS = [
    ("attention.self.query", "attn_q", (D, D)),
    ("attention.self.key", "attn_k", (D, D)),
    ("attention.self.value", "attn_v", (D, D)),
    ("attention.output.dense", "attn_output", (D, D)),
    ("intermediate.dense", "ffn_up", (D_FF, D)),
    ("output.dense", "ffn_down", (D, D_FF)),
]
NORMS = [
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("output.LayerNorm", "layer_output_norm"),
]


def names() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name in a folder, name in a GGUF file, and shape of each tensor."""
    yield from EMBEDDINGS
    for i in range(N_LAYERS):
        for a, b, shape in PROJECTIONS:
            yield f"encoder.layer.{i}.{a}.weight", f"blk.{i}.{b}.weight", shape
            yield f"encoder.layer.{i}.{a}.bias", f"blk.{i}.{b}.bias", shape[:1]
        for a, b in NORMS:
            yield f"encoder.layer.{i}.{a}.weight", f"blk.{i}.{b}.weight", (D,)
            yield f"encoder.layer.{i}.{a}.bias", f"blk.{i}.{b}.bias", (D,)


def tensors() -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Yield name in a folder, name in a GGUF file, and values that are exact in BF16."""
    rng = np.random.Generator(np.random.PCG64(0))
    for a, b, shape in names():
        if "norm.weight" in b:
            values = np.ones(shape, np.float32)
        elif b.endswith("bias"):
            values = np.zeros(shape, np.float32)
        else:
            values = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        yield a, b, (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def write_folder(folder: Path) -> None:
    """Write the Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "modules.json"):
        shutil.copy(SOURCE / name, folder / name)
    shutil.copytree(SOURCE / "1_Pooling", folder / "1_Pooling", dirs_exist_ok=True)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text("utf-8").replace("48", str(D)), "utf-8")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", [(a, shape) for a, _, shape in names()], tensors)


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a GGUF file with projections of this type; everything else is F32."""
    writer = gguf.GGUFWriter(f"{path}.part", "bert")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(N_POSITIONS)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(D_FF)
    writer.add_head_count(N_HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"t{i}" for i in range(4, VOCAB))])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    for _, name, values in tensors():
        if values.ndim == 1 or "blk" not in name:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(f"{path}.part").rename(path)


def main() -> None:
    """Create missing files."""
    folder = Path(sys.argv[1])
    if not (folder / "encoder" / "model.safetensors").exists():
        write_folder(folder / "encoder")
    for kind in ("BF16", "Q8_0"):
        path = folder / f"encoder-{kind.lower()}.gguf"
        if not path.exists():
            write_gguf(path, gguf.GGMLQuantizationType[kind])


if __name__ == "__main__":
    main()
