"""The packed size predicted from the headers equals the real size, for every container, type and family."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys._core import Context
from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from parity.checkpoints import read_weights
from parity.families import FAMILIES
from parity.gguf_files import read_tensors, write_like
from parity.gguf_model import write_gguf
from parity.int4_folders import Scheme, write_quantized
from parity.numpy_forward import Shape
from parity.random_model import random_weights, shapes, write_model

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"]
TYPES += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Rows of 256, as K types need; 130 tokens and 48 rows of K and V do not fill their last panel.
SHAPE = Shape(
    n_layers=2,
    d_model=256,
    n_heads=16,
    n_kv_heads=4,
    d_head=12,
    d_ff=256,
    vocab_size=130,
    rope_theta=1e4,
    rms_eps=1e-5,
    qkv_bias=False,
    qk_norm="none",
    tied=False,
)


def is_encoder(path: Path) -> bool:
    return inspect_model(path).is_encoder


def check(path: Path, *, is_plain: bool = True) -> None:
    """Compare predicted and real sizes. `is_plain`: the weights are floats, so loading can quantize them."""
    info = inspect_model(path)
    counted = info.packed_bytes
    assert list(counted) == ["auto", "float32", "bfloat16", "int8", "int4"]
    for dtype, n_bytes in counted.items():
        if dtype.startswith("int") and not is_plain:
            continue
        context = Context(
            str(path),
            dtype=dtype,
            n_cells=8,
            n_seq_max=1,
            n_batch=8,
            max_model_len=8,
            n_threads=1,
            prune_argmax=True,
        )
        assert n_bytes + info.screen_bytes[dtype] == context.weight_bytes, dtype
        context.close()


# Encoders are loaded by their own context (test_encoders.py).
@pytest.mark.parametrize(
    "name", sorted(n.name for n in GOLDENS.iterdir() if n.is_dir() and not is_encoder(n))
)
def test_goldens(name: str) -> None:
    check(GOLDENS / name, is_plain="mxfp4" not in name)


@pytest.mark.model
def test_smollm2() -> None:
    check(Path(resolve_model("smollm2").path), is_plain=False)


@pytest.mark.parametrize("other", [None, "Q8_0"], ids=["alone", "up in Q8_0"])
@pytest.mark.parametrize("dtype", TYPES)
def test_gguf_types(dtype: str, other: str | None, tmp_path: Path) -> None:
    """Gate and up are stored together: in float32 if their types differ."""
    plain = write_gguf(tmp_path / "plain.gguf", "llama", SHAPE, random_weights(SHAPE, 1))
    tensors = {}
    for name, values in read_tensors(plain).items():
        kind = other if other and "ffn_up" in name else dtype
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if values.ndim == 1 or values.shape[1] % block_len:
            tensors[name] = ("F32", values.shape, values.tobytes())
        else:
            tensors[name] = (kind, values.shape, bytes(values.size // block_len * block_bytes))
    is_plain = {kind for kind, _, _ in tensors.values()} <= {"F32", "F16", "BF16"}
    check(write_like(plain, tmp_path / "typed.gguf", tensors), is_plain=is_plain)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_folders(method: str, symmetric: bool, tmp_path: Path) -> None:
    source = GOLDENS / "qwen2-f16"
    scheme = Scheme(method, 32, symmetric)
    write_quantized(tmp_path / "model", source, read_weights(source / "model.safetensors"), scheme)
    check(tmp_path / "model", is_plain=False)


@pytest.mark.parametrize("container", ["folder", "gguf"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
@settings(max_examples=3, print_blob=True)
@given(data=st.data())
def test_families(family: str, container: str, data: st.DataObject) -> None:
    """With fused projections, stacked and single experts, and vectors of every kind."""
    shape = data.draw(shapes(family, gguf=container == "gguf"))
    weights = random_weights(shape, 1)
    with tempfile.TemporaryDirectory() as folder:
        if container == "folder" or not FAMILIES[family].gguf:
            check(write_model(Path(folder), family, shape, weights))
        else:
            check(write_gguf(Path(folder) / "model.gguf", family, shape, weights))
