"""What the default server weighs."""

from __future__ import annotations

import httpx
import psutil
import pytest

pytestmark = pytest.mark.model


def test_the_smollm2_server_stays_under_600_mb(smollm2_process: psutil.Process, smollm2_server: str) -> None:
    """With 2,048 cells, after requests that fill most of them, prompt and answer."""
    body = {
        "model": "smollm2",
        "prompt": [100] * 1500,
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
    }
    for _ in range(2):
        answer = httpx.post(f"{smollm2_server}/v1/completions", json=body, timeout=120)
        assert answer.json()["usage"]["total_tokens"] == 1532
    rss = smollm2_process.memory_info().rss
    print(f"RSS {rss / 1e6:.0f} MB")
    assert rss < 600e6
