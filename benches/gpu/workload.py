"""The engines of phase 4: each runs a workload on a checkpoint after a warm-up, and returns its figures.

`tokens_per_s` is the number of generated tokens divided by the time from the first submit to the last token.
Loading is not included.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import is_importable, nvidia_smi

Values = dict[str, Any]


class Unavailable(Exception):
    """An engine that cannot run here."""

    EXIT = 4


@dataclass(frozen=True)
class Workload:
    """Requests that start at once: prompts, tokens of each completion, the common temperature.

    `is_tiny` marks a dry run.
    """

    prompts: Sequence[list[int]]
    n_tokens: Sequence[int]
    temperature: float
    is_tiny: bool

    @property
    def max_len(self) -> int:
        return max(len(ids) + n for ids, n in zip(self.prompts, self.n_tokens, strict=True))


def throughput(seconds: float, n_out: Sequence[int], workload: Workload, how: str) -> Values:
    """Return the figures of a run. Every completion must have its number of tokens."""
    assert list(n_out) == list(workload.n_tokens), "a completion has another number of tokens than requested"
    used = nvidia_smi("memory.used")
    return {
        "seconds": seconds,
        "n_out": sum(n_out),
        "tokens_per_s": sum(n_out) / seconds,
        "memory_gb": float(used[0].split()[0]) * 2**20 / 1e9 if used else None,
        "how": how,
    }


def latency(first_s: Sequence[float], per_token_s: Sequence[float]) -> Values:
    """Return percentiles over requests of the time to the first token and the mean time per other token."""
    return {
        f"{name}_{label}_ms": 1e3 * float(np.percentile(values, percent))
        for name, values in (("ttft", first_s), ("tpot", per_token_s))
        for label, percent in (("p50", 50), ("p99", 99))
    }


def _settings(workload: Workload) -> dict[str, Any]:
    import llaisys

    info = llaisys.cuda_info()
    if info.reason is not None:
        raise Unavailable(f"CUDA cannot be used: {info.reason}")
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": workload.max_len,
        "max_num_seqs": len(workload.prompts),
        "max_num_batched_tokens": 32 if workload.is_tiny else 8192,
    }
    if workload.is_tiny:
        settings["num_kv_cells"] = 256
    return settings


def ours(folder: Path, workload: Workload) -> Values:
    """Run `LLM.generate`."""
    from llaisys import LLM, SamplingParams

    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True)
        for n in workload.n_tokens
    ]
    prompts = [{"prompt_token_ids": ids} for ids in workload.prompts]
    with LLM(str(folder), **_settings(workload)) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        begun = time.perf_counter()
        results = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        n_out = [len(result.outputs[0].token_ids) for result in results]
        return throughput(seconds, n_out, workload, "LLM.generate")


def ours_streams(folder: Path, workload: Workload) -> Values:
    """Run `AsyncLLM` with a stream per request, and measure when tokens reach their reader."""
    return asyncio.run(_streams(folder, workload))


async def _streams(folder: Path, workload: Workload) -> Values:
    from llaisys import AsyncLLM, RequestOutputKind, SamplingParams
    from llaisys.config import load_config

    async def one(ids: list[int], n: int, name: str) -> tuple[float, float, int]:
        kind = RequestOutputKind.DELTA
        params = SamplingParams(
            temperature=workload.temperature, max_tokens=n, ignore_eos=True, output_kind=kind
        )
        begun, first_s, n_out = time.perf_counter(), 0.0, 0
        async for delta in service.generate(ids, params, name):
            n_new = sum(len(output.token_ids) for output in delta.outputs)
            first_s = first_s or (time.perf_counter() - begun if n_new else 0.0)
            n_out += n_new
        return first_s, (time.perf_counter() - begun - first_s) / max(1, n_out - 1), n_out

    config = load_config({"model": str(folder), **_settings(workload)})
    service = await AsyncLLM.start(config)
    try:
        await one([1, 2, 3], 2, "warm-up")
        begun = time.perf_counter()
        requests = zip(workload.prompts, workload.n_tokens, strict=True)
        ended = await asyncio.gather(*(one(ids, n, f"{i}") for i, (ids, n) in enumerate(requests)))
        seconds = time.perf_counter() - begun
        how = "AsyncLLM, one stream per request"
        values = throughput(seconds, [n for *_, n in ended], workload, how)
    finally:
        await service.close()
    return values | latency([first for first, *_ in ended], [each for _, each, _ in ended])


def transformers(folder: Path, workload: Workload) -> Values:
    """Run continuous batching of transformers 5, with paged sdpa and its CUDA graphs."""
    if not (is_importable("torch") and is_importable("transformers")):
        raise Unavailable("transformers is not installed")
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    if not torch.cuda.is_available():
        raise Unavailable("torch finds no GPU")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    ).to("cuda")
    config = GenerationConfig(
        do_sample=True,
        temperature=workload.temperature,
        eos_token_id=-1,
        pad_token_id=0,
        max_new_tokens=max(workload.n_tokens),
    )
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        manager.add_request([1, 2, 3], request_id="warm-up", max_new_tokens=2)
        _collected(manager, 1)
        begun = time.perf_counter()
        for i, (ids, n) in enumerate(zip(workload.prompts, workload.n_tokens, strict=True)):
            manager.add_request(ids, request_id=f"{i}", max_new_tokens=n)
        ended = _collected(manager, len(workload.prompts))
        seconds = time.perf_counter() - begun
        n_out = [len(ended[f"{i}"].generated_tokens) for i in range(len(workload.prompts))]
        version = importlib.metadata.version("transformers")
        return throughput(seconds, n_out, workload, f"transformers {version}, continuous batching, sdpa")


def _collected(manager: Any, n: int) -> dict[str, Any]:
    """Return the next `n` requests that end."""
    ended: dict[str, Any] = {}
    while len(ended) < n:
        result = manager.get_result(timeout=60)
        if result is None:
            raise Unavailable("no result within a minute")
        if result.error:
            raise Unavailable(result.error)
        if result.is_finished():
            ended[result.request_id] = result
    return ended


def nano_vllm(folder: Path, workload: Workload) -> Values:
    """Run nano-vllm with flash-attn, or with a shim if flash-attn is not installed."""
    for name in ("torch", "triton", "xxhash", "nanovllm"):
        if not is_importable(name):
            raise Unavailable(f"{name} is not installed")
    from nanovllm import LLM, SamplingParams

    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True)
        for n in workload.n_tokens
    ]
    llm = LLM(str(folder), enforce_eager=False, max_model_len=max(workload.max_len, 4096))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    begun = time.perf_counter()
    results = llm.generate(list(workload.prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    n_out = [len(result["token_ids"]) for result in results]
    attention = getattr(__import__("flash_attn"), "SHIM", "flash-attn")
    return throughput(seconds, n_out, workload, f"nano-vllm, attention by {attention}")


ENGINES: dict[str, Callable[[Path, Workload], Values]] = {
    "ours": ours,
    "ours, streams": ours_streams,
    "nano-vllm": nano_vllm,
    "transformers": transformers,
}
