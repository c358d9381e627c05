"""`llaisys bench throughput` and `latency`: the engine without a server, through `LLM`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llaisys.bench.workload import Turn, Workload
from llaisys.config import Config
from llaisys.llm import LLM
from llaisys.outputs import RequestOutput
from llaisys.sampling_params import SamplingParams

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def throughput(config: Config, workload: Workload, n: int, temperature: float) -> dict[str, Any]:
    """Run all requests at once and return vLLM's metrics, plus output tokens per second.

    Raises ContextLengthError if a request does not fit.
    """
    with _llm(config) as llm:
        turns = _turns(llm, workload, config.seed)
        params = [_params(turn.output_len, n, temperature) for turn in turns]
        llm.generate([[1] * 8], _params(2, 1, 0.0), use_tqdm=False)  # warm up memory pages and thread pools
        start_s = time.perf_counter()
        outputs = llm.generate([turn.prompt for turn in turns], params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
    n_prompt, n_output = sum(len(a.prompt_token_ids) for a in outputs), _output_tokens(outputs)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(turns),
        "total_num_tokens": n_prompt + n_output,
        "requests_per_second": len(turns) / elapsed_s,
        "tokens_per_second": (n_prompt + n_output) / elapsed_s,
        "total_input_tokens": n_prompt,
        "total_output_tokens": n_output,
        "output_tokens_per_second": n_output / elapsed_s,
        "seed": config.seed,
    }


def latency(config: Config, workload: Workload, n: int, n_warmup: int, n_measured: int) -> dict[str, Any]:
    """Time `n_measured` runs of one batch, `workload`, after `n_warmup` runs. Return vLLM's metrics."""
    durations_s = []
    with _llm(config) as llm:
        turns = _turns(llm, workload, config.seed)
        params = [_params(turn.output_len, n, 1.0) for turn in turns]
        for _ in range(n_warmup + n_measured):
            start_s = time.perf_counter()
            llm.generate([turn.prompt for turn in turns], params, use_tqdm=False)
            durations_s.append(time.perf_counter() - start_s)
    measured = np.array(durations_s[n_warmup:])
    return {
        "avg_latency": float(measured.mean()),
        "std_latency": float(measured.std()),
        "latencies": measured.tolist(),
        "percentiles": {str(p): float(np.percentile(measured, p)) for p in LATENCY_PERCENTILES},
        "seed": config.seed,
    }


def _params(output_len: int, n: int, temperature: float) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=output_len, temperature=temperature, ignore_eos=True)


def _output_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)


def _llm(config: Config) -> LLM:
    """Load the model with the given settings."""
    return LLM(**config.model_dump(include=config.model_fields_set | {"model", "seed"}))


def _turns(llm: LLM, workload: Workload, seed: int) -> list[Turn]:
    """Draw the requests with ids of the model's vocabulary."""
    drawn = replace(workload, vocab_size=llm.model_info.vocab_size).draw(seed)
    return [turn for conversation in drawn for turn in conversation]
