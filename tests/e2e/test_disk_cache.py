"""The disk tier of the prefix cache in a real server: a restart does not compute a long prompt again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from serving import Server, long_model, serving

N_PROMPT, BLOCK = 6_000, 256
N_LOADED = N_PROMPT // BLOCK * BLOCK


def complete(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "logprobs": 3, "temperature": 0, "ignore_eos": True, **more}
    answer = server.http.post("/v1/completions", json={"model": server.model, **body})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def n_cached(made: dict[str, Any]) -> int:
    return int(made["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_restart_computes_only_the_last_block(tmp_path: Path) -> None:
    """Only for the same salt, and with the same logprobs. The second engine is in its own process."""
    model, rng = long_model(tmp_path), random.Random(6)
    prompt = [rng.randrange(5, 500) for _ in range(N_PROMPT)]
    flags = ("--num-kv-cells", "8192", "--prefix-cache-dir", str(tmp_path / "cache"))
    with serving(tmp_path, str(model), *flags) as server:
        cold = complete(server, prompt, cache_salt="a")
        assert n_cached(cold) == 0
        assert server.stop() == 0
    with serving(tmp_path, str(model), *flags, "--engine-process") as server:
        warm = complete(server, prompt, cache_salt="a")
        assert n_cached(warm) == N_LOADED
        assert warm["choices"] == cold["choices"]
        assert server.metric("vllm:external_prefix_cache_queries_total") == N_PROMPT
        assert server.metric("vllm:external_prefix_cache_hits_total") == N_LOADED
        assert n_cached(complete(server, prompt[:600], cache_salt="b")) == 0
        assert server.stop() == 0
