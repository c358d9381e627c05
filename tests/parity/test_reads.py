"""Loading reads each byte of a tensor once, fused tensors and stacks of experts included."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys._core import inspect
from parity.families import FAMILIES
from parity.gguf_model import write_gguf
from parity.random_model import random_weights, shapes, write_model
from runner import Runner

CONTAINERS = [(family, "folder") for family in sorted(FAMILIES)]
CONTAINERS += [(family, "gguf") for family in sorted(FAMILIES) if FAMILIES[family].gguf]


def n_bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.parametrize(("family", "container"), CONTAINERS)
@settings(max_examples=3, print_blob=True)
@given(data=st.data())
def test_each_tensor_is_read_once(family: str, container: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(family, gguf=container == "gguf"))
    weights = random_weights(shape, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if container == "gguf":
            path = write_gguf(path / "model.gguf", family, shape, weights)
        else:
            write_model(path, family, shape, weights)
        before = n_bytes_read()
        inspect(str(path))  # headers only
        between = n_bytes_read()
        with Runner(path, dtype="auto", max_model_len=16, n_cells=16, n_seq_max=1):
            n_read = n_bytes_read() - between - (between - before)
        files = [path] if path.is_file() else list(path.iterdir())
        n_bytes = sum(file.stat().st_size for file in files)
    assert 0.5 * sum(values.size for values in weights.values()) <= n_read <= n_bytes
