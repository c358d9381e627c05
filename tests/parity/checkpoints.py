"""Read golden folders for the NumPy forward pass, without the core."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.families import FAMILIES
from parity.numpy_forward import Shape
from parity.random_model import FUSED, neighbors


def read_weights(path: Path) -> dict[str, NDArray[np.float32]]:
    """Read every tensor of a safetensors file in float32: 8-byte length, JSON header, then the data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    weights = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        weights[name] = _float32(body[start:end], entry["dtype"]).reshape(entry["shape"])
    return weights


def _float32(raw: bytes, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


def read_shape(folder: Path, context: int = 512) -> Shape:
    """Read the configuration of a folder, in either spelling; `context` is `max_model_len`."""
    config = _text_config(folder)
    facts = FAMILIES[config["model_type"]]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = config.get("rope_theta") or rope.pop("rope_theta")
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    original = "original_max_position_embeddings"
    if original in config:
        rope[original] = config[original]
    kinds = config.get("layer_types", []) if facts.window == "pattern" else []
    d_head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    biased = {part for key, parts in facts.biases if config.get(key) for part in parts.split()}
    return Shape(
        n_layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        d_head=d_head,
        d_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        rope_theta=theta,
        rms_eps=config["rms_norm_eps"],
        qkv_bias=facts.qkv_bias or "qkv" in biased,
        o_bias="o" in biased,
        mlp_bias="mlp" in biased,
        qk_norm=facts.qk_norm,
        tied=config["tie_word_embeddings"],
        max_positions=config["max_position_embeddings"],
        rope=rope,
        context=context,
        d_rope=int(d_head * config.get("partial_rotary_factor", 1.0)),
        rotated=_rotated(config) if facts.unrotated else (),
        query_scaling=(rope["llama_4_scaling_beta"], rope[original]) if facts.scaled_queries else None,
        local_theta=theta if facts.unscaled_local_rope else None,
        window=config["sliding_window"] if kinds else None,
        windowed=tuple(kind == "sliding_attention" for kind in kinds),
        pre_norms=facts.pre_norms,
        post_norms=facts.post_norms,
        embed_scale=float(config.get("embedding_multiplier", 1)),
        residual_scale=float(config.get("residual_multiplier", 1)),
        score_scale=config.get("attention_multiplier"),
        logit_scale=1 / config.get("logits_scaling", 1.0),
    )


def _rotated(config: dict[str, Any]) -> tuple[bool, ...]:
    default = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return tuple(flag == 1 for flag in config.get("no_rope_layers", default))


def folder_without(folder: Path, target: Path, keys: Sequence[str]) -> Path:
    """Return a copy of a folder in `target` whose configuration lacks some keys."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    copy = target / "copy"
    copy.mkdir()
    shutil.copy(folder / "model.safetensors", copy)
    kept = {key: value for key, value in config.items() if key not in keys}
    (copy / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return copy


def read_text_weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Read the tensors of the text model, named as in a folder without a vision model."""
    weights = read_weights(folder / "model.safetensors")
    plain = {name.removeprefix("language_model."): value for name, value in weights.items()}
    return {name: value for name, value in plain.items() if name.startswith(("model.", "lm_head."))}


def _text_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return config.get("text_config", config)


def read_model(folder: Path, context: int = 512) -> tuple[str, Shape, dict[str, NDArray[np.float32]]]:
    """Read a folder: its family, shape, and the weights of the text model as in `parity.numpy_forward`."""
    family = _text_config(folder)["model_type"]
    facts, shape = FAMILIES[family], read_shape(folder, context)
    weights = {}
    for name, value in read_text_weights(folder).items():
        pairs = [(ours, theirs) for ours, theirs in facts.renamed if theirs in name]
        # Norms swap names, so each is renamed once.
        weights[name.replace(pairs[0][1], pairs[0][0]) if pairs else name] = value
    for i in range(shape.n_layers):
        for fused in facts.fused:
            prefix, parts = FUSED[fused]
            kv = shape.n_kv_heads * shape.d_head
            ends = [shape.n_heads * shape.d_head, shape.n_heads * shape.d_head + kv]
            whole = weights.pop(f"model.layers.{i}.{prefix}.{fused}_proj.weight")
            for part, rows in zip(parts, np.split(whole, ends if fused == "qkv" else 2), strict=True):
                weights[f"model.layers.{i}.{prefix}.{part}_proj.weight"] = rows
    return family, shape, neighbors(shape, weights, undo=True) if facts.neighbors else weights
