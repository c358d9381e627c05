"""What the headers say the packed weights will take is what they take: every container, type and family."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys._core import Context
from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from parity.checkpoints import read_weights
from parity.gguf_files import read_tensors, write_like
from parity.gguf_model import write_gguf
from parity.int4_folders import Scheme, write_quantized
from parity.k_quants import quantize
from parity.random_model import FAMILIES, random_weights, shapes, write_model

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


def check(path: Path) -> None:
    for dtype, n_bytes in inspect_model(path).packed_bytes.items():
        context = Context(
            str(path), dtype=dtype, n_cells=8, n_seq_max=1, n_batch=8, max_model_len=8, n_threads=1
        )
        assert n_bytes == context.weight_bytes, dtype
        context.close()
