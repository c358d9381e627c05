"""Read golden folders for the NumPy forward pass, without the core."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parity.numpy_forward import Shape
from parity.random_model import FAMILIES


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


def read_shape(folder: Path) -> Shape:
    """Read the configuration of a folder, in either spelling."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    facts = FAMILIES[config["model_type"]]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = config.get("rope_theta") or rope.pop("rope_theta")
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    biased = {part for key, parts in facts.biases if config.get(key) for part in parts.split()}
    return Shape(
        n_layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        d_head=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
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
        embed_scale=float(config.get("embedding_multiplier", 1)),
        residual_scale=float(config.get("residual_multiplier", 1)),
        score_scale=config.get("attention_multiplier"),
        logit_scale=1 / config.get("logits_scaling", 1.0),
    )


def read_model(folder: Path) -> tuple[str, Shape, dict[str, NDArray[np.float32]]]:
    """Read a folder: its family, its shape, and its weights named as in `parity.numpy_forward`."""
    family: str = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    weights = {}
    for name, value in read_weights(folder / "model.safetensors").items():
        ours = name
        for old, new in FAMILIES[family].renamed:
            ours = ours.replace(new, old)
        weights[ours] = value
    return family, read_shape(folder), weights
