"""Memory of the default server."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import psutil
import pytest

from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from serving import END_S, environment

LOAD = """
import json, sys
from pathlib import Path
from llaisys._core import Context
settings = dict(n_cells=64, n_seq_max=1, n_batch=16, max_model_len=64, n_threads=2)
context = Context(sys.argv[1], dtype=sys.argv[2], **settings)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps([context.weight_bytes, int(status["VmHWM"].split()[0]) * 1024]))
"""

pytestmark = [pytest.mark.model, pytest.mark.two_cpus]


def test_the_smollm2_server_stays_under_600_mb(smollm2_process: psutil.Process, smollm2_server: str) -> None:
    """With 2,048 cells, after requests that fill most of them."""
    body = {
        "model": "smollm2",
        "prompt": [100] * 1500,
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
    }
    for _ in range(2):
        response = httpx.post(f"{smollm2_server}/v1/completions", json=body, timeout=None)
        assert response.json()["usage"]["total_tokens"] == 1532
    rss = smollm2_process.memory_info().rss
    print(f"RSS {rss / 1e6:.0f} MB")
    assert rss < 600e6


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_loading_needs_little_more_than_the_packed_weights(dtype: str) -> None:
    """The peak is that of the packed weights, one tensor, and 60 MB for the interpreter with NumPy.

    The limit of the documentation is 200 MB. The 98 MB of the file would not fit if they stayed resident.
    """
    path = resolve_model("smollm2").path
    info = inspect_model(path)
    command = [sys.executable, "-c", LOAD, str(path), dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment(), timeout=END_S
    )
    weights, peak = json.loads(done.stdout)
    tensor = info.vocab_size * info.d_model * (4 if dtype == "float32" else 34 / 32)
    print(f"{dtype}: weights {weights / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert peak <= weights + tensor + 60e6
