"""Make the inputs of the phases from their sources.

usage: prepare.py [--out benches/gpu/inputs] [--nano-vllm FOLDER]

- `smollm2-8.packed.safetensors`: the first 8 layers of the embedded SmolLM2, with matrices as Q4_1 blocks (36
  MB). The embedding, Q8_0 in the source, is quantized again; both engines of a comparison read the result.
  With it come `smollm2-config.json` and `smollm2-tokenizer/`.
- `qwen2-tokenizer/`, for the random models.
- `nano-vllm/`: the package and its license, from a checkout of GeeeekExplorer/nano-vllm in FOLDER.
- `prompts.json`: token ids of SmolLM2's tokenizer, consecutive parts of tests/data/text/mixed.txt.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models import PACKED, TOKENIZER
from numpy.typing import NDArray

from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from llaisys.text.tokenizer import load_tokenizer

DATA = Path(__file__).parents[2] / "tests" / "data"
N_LAYERS = 8
# Tokens of the prompts: four groups of eight, with whole and partial tiles of attention.
PROMPT_LENGTHS = [length for length in (7, 33, 64, 130) for _ in range(8)]
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensors(reader: gguf.GGUFReader, heads: dict[str, int]) -> dict[str, NDArray[Any]]:
    """Return tensors by Hugging Face's names: Q4_1 blocks as bytes `[rows, bytes]`, vectors in float32."""
    found = {tensor.name: tensor for tensor in reader.tensors}
    q4 = gguf.GGMLQuantizationType.Q4_1

    def packed(name: str) -> NDArray[Any]:
        tensor = found[name]
        if tensor.tensor_type in (q4, gguf.GGMLQuantizationType.F32):
            return np.array(tensor.data)
        return gguf.quants.quantize(gguf.quants.dequantize(tensor.data, tensor.tensor_type), q4)

    made = {"model.embed_tokens.weight": packed("token_embd.weight")}
    for layer in range(N_LAYERS):
        for source, target in NAMES.items():
            values = packed(f"blk.{layer}.{source}.weight")
            if source in heads:
                # GGUF stores the two elements of a rotary pair next to each other (convert_hf_to_gguf.py,
                # `permute`).
                pairs = values.reshape(heads[source], -1, 2, values.shape[1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            made[f"model.layers.{layer}.{target}.weight"] = values
    made["model.norm.weight"] = packed("output_norm.weight")
    return made


def write_safetensors(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write arrays of bytes and of float32."""
    header, offset = {}, 0
    for name, values in arrays.items():
        kind = "U8" if values.dtype == np.uint8 else "F32"
        end = offset + values.nbytes
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in arrays.values():
            np.ascontiguousarray(values).tofile(file)


def smollm2(out: Path) -> None:
    """Write the packed model, its config, tokenizer and prompts."""
    source = Path(resolve_model("smollm2").path)
    info, reader = inspect_model(str(source)), gguf.GGUFReader(source)
    heads = {"attn_q": info.n_heads, "attn_k": info.n_kv_heads}
    write_safetensors(out / PACKED, tensors(reader, heads))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": info.d_model,
        "intermediate_size": info.d_ff,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": info.n_heads,
        "num_key_value_heads": info.n_kv_heads,
        "vocab_size": info.vocab_size,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (out / "smollm2-config.json").write_text(json.dumps(config, indent=1), "utf-8")
    tokenizer = load_tokenizer(info)
    folder = out / "smollm2-tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), "utf-8")
    ids = tokenizer.encode((DATA / "text" / "mixed.txt").read_text("utf-8"), add_special_tokens=False)
    prompts, at = [], 0
    for length in PROMPT_LENGTHS:
        prompts.append(ids[at : at + length])
        at += length
    (out / "prompts.json").write_text(json.dumps(prompts), "utf-8")


def main() -> None:
    """Parse the flags and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "inputs")
    parser.add_argument("--nano-vllm", type=Path, help="a checkout of nano-vllm (MIT license)")
    flags = parser.parse_args()
    out: Path = flags.out
    out.mkdir(parents=True, exist_ok=True)
    if flags.nano_vllm:
        shutil.copytree(flags.nano_vllm / "nanovllm", out / "nano-vllm" / "nanovllm", dirs_exist_ok=True)
        shutil.copy(flags.nano_vllm / "LICENSE", out / "nano-vllm" / "LICENSE")
    smollm2(out)
    folder = out / "qwen2-tokenizer"
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(DATA / "qwen2-tokenizer" / name, folder / name)
    n_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {n_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
