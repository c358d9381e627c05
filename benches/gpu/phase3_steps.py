"""Phase 3: time of a decode step compared with the roofline, for Qwen2.5 0.5B, 1.5B and 7B, batch 1 to 256.

usage: phase3_steps.py --out DIR [--inputs DIR] [--dry-run] [--budget-s 240] [--fresh]

A step's time is the difference of two runs that differ only in their number of steps. Prompts are in the
prefix cache and all requests start at once, so everything except the steps cancels. The bound is

    max(weights / bandwidth, FLOP / rate) + K and V read / bandwidth

with bandwidth (of a copy) and rate (of a bf16 product of 8192 x 8192 x 8192) measured on this device. FLOP
are 2 x batch x weights + 4 x batch x context x heads x d x layers. The GPU's idle share is the share of time
without a kernel, between the first and the last kernel that CUPTI reports. Weights are random, because a
step's time does not depend on their values.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
from common import Column, Phase, Row, Skip, arguments, is_importable, nvidia_smi
from engines import Ids, ours

from llaisys import LLM, SamplingParams

BATCHES = (1, 8, 64, 256)
N_PAIRS = 3
# Tokens of the prompts and of the two runs. The steps between them have contexts around 512.
PROMPT, SHORT, LONG = 472, 8, 72
PROMPT_DRY, SHORT_DRY, LONG_DRY = 9, 2, 4
COPY_BYTES, PRODUCT = 1 << 30, 8192
# Approximate time to make a model's weights, to load them and to measure a row, on an H200.
EXPECTED_S = {"0.5B": 6.0, "1.5B": 8.0, "7B": 30.0}
COLUMNS = [
    Column("step_ms", "step, ms", "{:.3f}"),
    Column("tokens_per_s", "tokens/s", "{:.0f}"),
    Column("bound_ms", "bound, ms", "{:.3f}"),
    Column("share", "of the bound", "{:.0%}"),
    Column("idle", "GPU idle", "{:.0%}"),
    Column("memory_gb", "GPU memory, GB", "{:.1f}"),
    Column("gb_s", "GB/s", "{:.0f}"),
    Column("tflop_s", "TFLOP/s", "{:.0f}"),
]


def bound_s(shape: models.Shape, batch: int, context: float, gb_s: float, tflop_s: float) -> float:
    """Return the roofline of a step, in seconds."""
    flop = 2 * batch * shape.n_step_weights
    flop += 4 * batch * context * shape.n_heads * shape.d_head * shape.n_layers
    read_s = 2 * shape.n_step_weights / (gb_s * 1e9)
    return max(read_s, flop / (tflop_s * 1e12)) + batch * context * shape.kv_bytes / (gb_s * 1e9)


def busy_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time from the first begin to the last end that is inside an interval."""
    ordered = sorted(intervals)
    busy, until = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / (until - ordered[0][0])


def measure_device(dry_run: bool) -> dict[str, float]:
    """Return the bandwidth of a copy and the rate of a product, each the best of five."""
    if is_importable("torch"):
        import torch

        if torch.cuda.is_available():
            found = _measure_gpu()
            torch.cuda.empty_cache()
            return found
    if dry_run:
        return _measure_host()
    raise Skip("torch with a GPU is needed to measure its bandwidth")


def _measure_gpu() -> dict[str, float]:
    import torch

    def best_ms(work: Any) -> float:
        taken = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end))
        return min(taken[1:])

    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy_ms, product_ms = best_ms(lambda: target.copy_(source)), best_ms(lambda: a @ b)
    return {"gb_s": 2 * COPY_BYTES / copy_ms / 1e6, "tflop_s": 2 * PRODUCT**3 / product_ms / 1e9}


def _measure_host() -> dict[str, float]:
    def best_s(work: Any) -> float:
        taken = []
        for _ in range(5):
            begun = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begun)
        return min(taken)

    n, values = 256, np.ones(1 << 22, np.uint8)
    matrix = np.ones((n, n), np.float32)
    return {
        "gb_s": 2 * values.nbytes / best_s(values.copy) / 1e9,
        "tflop_s": 2 * n**3 / best_s(lambda: matrix @ matrix) / 1e12,
    }


def run_s(llm: LLM, prompts: Sequence[Ids], n_tokens: int) -> float:
    """Return the seconds of a run that generates `n_tokens` tokens for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    begun = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    taken = time.perf_counter() - begun
    assert all(len(result.outputs[0].token_ids) == n_tokens for result in results)
    return taken


def trace(llm: LLM, prompts: Sequence[Ids], n_tokens: int, phase: Phase) -> dict[str, Any]:
    """Return the GPU's idle share of one run, and each kernel's share of the busy time.

    Both are missing if kernels cannot be traced.
    """
    if not is_importable("torch"):
        phase.note("GPU idle: not measured, because torch and its profiler are not installed.")
        return {}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run_s(llm, prompts, n_tokens)
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    if not events:
        phase.note("GPU idle: not measured, because CUPTI reported no kernel.")
        return {}
    taken: Counter[str] = Counter()
    for event in events:
        taken[event.name.partition("(")[0][:60]] += event.time_range.elapsed_us()
    kernels = {name: round(us / taken.total(), 4) for name, us in taken.most_common(12)}
    ranges = ((event.time_range.start, event.time_range.end) for event in events)
    return {"idle": 1 - busy_share(ranges), "kernels": kernels, "n_kernels": len(events)}


def memory_gb() -> float | None:
    """Return the GPU memory in use by all processes, in GB."""
    used = nvidia_smi("memory.used")
    return float(used[0].split()[0]) * 2**20 / 1e9 if used else None


def measure(phase: Phase, out: Path, inputs: Path, name: str, batch: int) -> dict[str, Any]:
    """Measure one row."""
    device = phase.done("device")
    if device is None:
        raise Skip("the device's bandwidth was not measured")
    shape = models.TINY if phase.dry_run else models.QWEN[name]
    folder = models.random_model(out, inputs, name, shape)
    length, short, long = (PROMPT_DRY, SHORT_DRY, LONG_DRY) if phase.dry_run else (PROMPT, SHORT, LONG)
    draw = random.Random(0)
    prompts = [[draw.randrange(shape.vocab_size - 1) for _ in range(length)] for _ in range(batch)]
    settings = {
        "max_num_seqs": batch,
        "max_num_batched_tokens": 64 if phase.dry_run else 8192,
        "max_model_len": length + long + 8,
        "num_kv_cells": 2 * batch * (length + long + 8),
    }
    before = memory_gb()
    with ours(folder, **settings) as llm:
        run_s(llm, prompts, short)  # computes the prompts, captures graphs
        run_s(llm, prompts, short)
        pairs = [
            (run_s(llm, prompts, short), run_s(llm, prompts, long))
            for _ in range(1 if phase.dry_run else N_PAIRS)
        ]
        step_s = statistics.median(b - a for a, b in pairs) / (long - short)
        after, traced = memory_gb(), {} if phase.dry_run else trace(llm, prompts, long, phase)
    context = length + (short + long) / 2
    bound = bound_s(shape, batch, context, device["gb_s"], device["tflop_s"])
    return {
        "step_ms": 1e3 * step_s,
        "tokens_per_s": batch / step_s,
        "bound_ms": 1e3 * bound,
        "share": bound / step_s,
        "memory_gb": None if after is None or before is None else after - before,
        "context": context,
        **traced,
    }


def main() -> int:
    """Parse the flags and measure."""
    flags = arguments(__doc__).parse_args()
    phase = Phase(3, "A decode step compared with the roofline", COLUMNS, flags)
    rows = [Row("device", partial(measure_device, flags.dry_run), 20)]
    one = partial(measure, phase, flags.out, flags.inputs)
    if flags.dry_run:
        phase.note("Bandwidth and rate of a dry run are the host's; idle share and memory are not measured.")
        rows += [Row(f"tiny, batch {batch}", partial(one, "tiny", batch)) for batch in (1, 3)]
    else:
        rows += [
            Row(f"{name}, batch {batch}", partial(one, name, batch), EXPECTED_S[name])
            for name in models.QWEN
            for batch in BATCHES
        ]
    return phase.run(rows)


if __name__ == "__main__":
    sys.exit(main())
