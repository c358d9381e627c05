"""The models of the comparison: one of Qwen2.5-0.5B's shape with random weights, in each engine's format.

usage: .venv-peers/bin/python benches/peers_models.py FOLDER

Writes FOLDER/q05 (a Hugging Face folder in BF16), q05-{bf16,f16,q8_0,q4_0}.gguf and q05-ov-{bf16,int8,int4}
(OpenVINO, which reads no BF16 file: created from the F16 one and run in bf16). The weights are a function of
a seed, so every machine creates the same files. The speed of a dense model does not depend on its weights,
except for the rows that pruned argmax reads. Nothing is downloaded: the tokenizer is from the test data.
Existing files are kept. The 4-bit files have the embedding, which is also the head, in 8 bits, for every
engine.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "qwen2-tokenizer"
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# Names of a layer's tensors: Hugging Face's, GGUF's, and the shape (the norms have one dimension).
LAYER = [
    ("input_layernorm.weight", "attn_norm.weight", (896,)),
    ("self_attn.q_proj.weight", "attn_q.weight", (896, 896)),
    ("self_attn.q_proj.bias", "attn_q.bias", (896,)),
    ("self_attn.k_proj.weight", "attn_k.weight", (128, 896)),
    ("self_attn.k_proj.bias", "attn_k.bias", (128,)),
    ("self_attn.v_proj.weight", "attn_v.weight", (128, 896)),
    ("self_attn.v_proj.bias", "attn_v.bias", (128,)),
    ("self_attn.o_proj.weight", "attn_output.weight", (896, 896)),
    ("post_attention_layernorm.weight", "ffn_norm.weight", (896,)),
    ("mlp.gate_proj.weight", "ffn_gate.weight", (4864, 896)),
    ("mlp.up_proj.weight", "ffn_up.weight", (4864, 896)),
    ("mlp.down_proj.weight", "ffn_down.weight", (896, 4864)),
]


def tensors() -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Yield name in a folder, name in a GGUF file, and values that are exact in BF16; equal on every
    machine."""
    generator = np.random.Generator(np.random.PCG64(0))
    named = [("model.embed_tokens.weight", "token_embd.weight", (151936, 896))]
    for i in range(CONFIG["num_hidden_layers"]):
        named += [(f"model.layers.{i}.{a}", f"blk.{i}.{b}", shape) for a, b, shape in LAYER]
    named.append(("model.norm.weight", "output_norm.weight", (896,)))
    for a, b, shape in named:
        if b.endswith("norm.weight"):
            values = np.ones(shape, np.float32)
        else:
            values = generator.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        yield a, b, (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def write_folder(folder: Path) -> None:
    """Write the Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n", encoding="utf-8")
    write_safetensors(
        folder / "model.safetensors", [(name, values.shape) for name, _, values in tensors()], tensors
    )


def write_safetensors(
    path: Path,
    shapes: list[tuple[str, tuple[int, ...]]],
    values: Callable[[], Iterator[tuple[str, str, NDArray[np.float32]]]],
) -> None:
    """Write BF16 tensors, one after the other, after a JSON header of their `shapes`."""
    header, end = {}, 0
    for name, shape in shapes:
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = Path(f"{path}.part")
    with part.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, array in values():
            out.write((array.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    part.rename(path)


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write a GGUF file with matrices of this type; the embedding has at least 8 bits, vectors are F32."""
    writer = gguf.GGUFWriter(str(path) + ".part", "qwen2")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_name("q05 random")
    file_types = {"BF16": 32, "F16": 1, "Q8_0": 7, "Q4_0": 2}  # llama.cpp's `llama_ftype`
    writer.add_file_type(file_types[kind.name])
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text("utf-8"))
    tokens = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    unused = {i: f"[PAD{i}]" for i in range(CONFIG["vocab_size"])}
    texts = unused | tokens | special
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts[i] for i in range(CONFIG["vocab_size"])])
    types = [kinds.CONTROL if i in special else kinds.NORMAL if i in tokens else kinds.UNUSED for i in unused]
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(CONFIG["bos_token_id"])
    writer.add_eos_token_id(CONFIG["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((TOKENIZER / "chat_template.jinja").read_text("utf-8"))
    for _, name, values in tensors():
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        is_head = name == "token_embd.weight" and kind == gguf.GGMLQuantizationType.Q4_0
        own = gguf.GGMLQuantizationType.Q8_0 if is_head else kind
        writer.add_tensor(name, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(str(path) + ".part").rename(path)


def write_openvino(folder: Path) -> None:
    """Write OpenVINO's files: its reader of the F16 file saves the graph, and nncf compresses it as
    optimum-intel does (int8: one scale per channel, asymmetric; int4: symmetric, groups of 128, embedding in
    int8)."""
    import nncf
    import openvino as ov
    import openvino_genai as genai

    plain = folder / "q05-ov-bf16"
    if not (plain / "openvino_model.bin").exists():
        plain.mkdir(exist_ok=True)
        source = plain / "q05-f16.gguf"
        source.symlink_to(folder / "q05-f16.gguf")
        genai.LLMPipeline(source, "CPU", enable_save_ov_model=True)
        source.unlink()
    modes = nncf.CompressWeightsMode
    ways = {
        "int8": {"mode": modes.INT8_ASYM},
        "int4": {"mode": modes.INT4_SYM, "group_size": 128, "ratio": 1.0},
    }
    for name, way in ways.items():
        out = folder / f"q05-ov-{name}"
        if (out / "openvino_model.bin").exists():
            continue
        model = ov.Core().read_model(plain / "openvino_model.xml")
        ov.save_model(nncf.compress_weights(model, **way), out / "openvino_model.xml", compress_to_fp16=False)
        for file in plain.glob("openvino_*tokenizer.*"):
            shutil.copy(file, out)


def main() -> None:
    """Create missing files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "q05" / "model.safetensors").exists():
        write_folder(folder / "q05")
    for kind in ("BF16", "F16", "Q8_0", "Q4_0"):
        path = folder / f"q05-{kind.lower()}.gguf"
        if not path.exists():
            write_gguf(path, gguf.GGMLQuantizationType[kind])
    write_openvino(folder)


if __name__ == "__main__":
    main()
