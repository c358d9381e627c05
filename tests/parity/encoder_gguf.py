"""GGUF files of encoders, as llama.cpp's `conversion/bert.py` writes them from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from parity.checkpoints import read_weights

Q8_0 = gguf.GGMLQuantizationType.Q8_0
_CONTROL, _NORMAL = 3, 1
_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
_MODERN_BERT = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "attn_norm": "attn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "mlp_norm": "ffn_norm",
    "final_norm": "output_norm",
}
_POOLING = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2}


def write_encoder(
    path: Path, folder: Path, *, quantize: bool = False, drop: tuple[str, ...] = (), **changes: Any
) -> Path:
    """Write the file of a folder, matrices in F32 or Q8_0; return it.

    `drop`: tensors and keys that are left out. `changes`: keys, with `__` for a dot, whose values replace or
    add others.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    is_modern = config["model_type"] == "modernbert"
    architecture = "modern-bert" if is_modern else "bert"
    keys: dict[str, Any] = {f"{architecture}.{key}": value for key, value in _keys(config, is_modern).items()}
    keys |= _pooling(folder, architecture) | _tokenizer(folder, config)
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if key in drop:
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, values in _tensors(folder, config, is_modern).items():
        if name in drop:
            continue
        if quantize and values.ndim == 2 and values.shape[1] % 32 == 0 and "position" not in name:
            writer.add_tensor(name, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: dict[str, Any], is_modern: bool) -> dict[str, Any]:
    offset = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"] - offset,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": float(config["norm_eps" if is_modern else "layer_norm_eps"]),
        "attention.causal": False,
    }
    if is_modern:
        keys |= {
            "attention.sliding_window": config["local_attention"],
            "attention.sliding_window_pattern": config["global_attn_every_n_layers"],
            "rope.freq_base": config["global_rope_theta"],
            "rope.freq_base_swa": config["local_rope_theta"],
        }
    return keys


def _pooling(folder: Path, architecture: str) -> dict[str, int]:
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return {}
    stated = json.loads(path.read_text("utf-8"))
    return {f"{architecture}.pooling_type": kind for name, kind in _POOLING.items() if stated.get(name)}


def _tokenizer(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    whole = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model, added = whole["model"], {token["id"]: token["content"] for token in whole["added_tokens"]}
    ids = {name: id for id, name in added.items()}
    kinds = [_CONTROL if id in added else _NORMAL for id in range(config["vocab_size"])]
    keys: dict[str, Any] = {"token_type": kinds, "token_type_count": config.get("type_vocab_size", 1)}
    match model["type"]:
        case "WordPiece":
            tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
            tokens = [
                token if id in added else token[2:] if token.startswith("##") else f"\u2581{token}"
                for id, token in enumerate(tokens)
            ]
            keys |= {"model": "bert", "pre": "jina-v2-en", "tokens": tokens}
            keys |= {"unknown_token_id": ids["[UNK]"], "cls_token_id": ids["[CLS]"]}
            keys |= {"seperator_token_id": ids["[SEP]"]}
        case "Unigram":
            tokens, scores = zip(*model["vocab"], strict=True)
            keys |= {
                "model": "t5",
                "pre": "default",
                "tokens": list(tokens),
                "scores": list(map(float, scores)),
            }
            keys |= {"add_space_prefix": True, "remove_extra_whitespaces": True, "unknown_token_id": 3}
            keys |= {"bos_token_id": 0, "eos_token_id": 2, "add_bos_token": True, "add_eos_token": True}
        case _:
            vocab = model["vocab"] | ids
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
            keys |= {"model": "gpt2", "pre": "qwen2", "tokens": sorted(vocab, key=vocab.__getitem__)}
            keys |= {"merges": merges, "bos_token_id": ids["[CLS]"], "eos_token_id": ids["[SEP]"]}
            keys |= {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _tensors(folder: Path, config: dict[str, Any], is_modern: bool) -> dict[str, NDArray[np.float32]]:
    names = _MODERN_BERT if is_modern else _BERT
    tensors = {}
    for name, values in read_weights(folder / "model.safetensors").items():
        module, _, kind = name.removeprefix("roberta.").removeprefix("model.").rpartition(".")
        module = module.removeprefix("encoder.")
        if module.startswith("pooler"):
            continue
        if config["model_type"] == "xlm-roberta" and module == "embeddings.position_embeddings":
            values = values[config["pad_token_id"] + 1 :]
        layer = ""
        if module.startswith(("layer.", "layers.")):
            _, number, module = module.split(".", 2)
            layer = f"blk.{number}."
        tensors[f"{layer}{names[module]}.{kind}"] = values
    return tensors
