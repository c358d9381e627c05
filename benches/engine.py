"""Measure the Python cost of a step (plan, arrays, result), with a core that costs nothing.

    python benches/engine.py [--sequences 256] [--steps 2000]

Prints one JSON line: microseconds of a step (median, 99th percentile) with all sequences decoding, and of its
parts. The goal is 1 ms per step with 256 sequences on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.engine import LLMEngine
from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits
from llaisys.engine.request import EngineRequest
from llaisys.engine.worker import Worker
from llaisys.sampling_params import SamplingParams

VOCAB_SIZE = 1000


class FreeCore:
    """Implements the calls of `_core.Context` at no cost: it counts cells, and all tokens are 7."""

    def __init__(self, n_cells: int, n_seq_max: int) -> None:
        self.n_cells = self.n_cells_free = n_cells
        self.n_seq_free = n_seq_max
        self.vocab_size = VOCAB_SIZE
        self.attention_window = None
        self._ids: dict[int, NDArray[np.int32]] = {}

    def seq_acquire(self, stream: int) -> int:
        self.n_seq_free -= 1
        return self.n_seq_free + (stream << 32)

    def seq_release(self, *_: Any) -> None:
        self.n_seq_free += 1

    def decode(self, tokens: NDArray[Any], *others: NDArray[Any]) -> Any:
        self.n_cells_free -= len(tokens)
        n_out = int(others[-1].sum())
        ids = self._ids.setdefault(n_out, np.full(n_out, 7, np.int32))
        empty = {"faults": [], "logprobs": [], "hidden": None, "graph_refusal": None}
        return SimpleNamespace(token_ids=ids, rows=ids, **empty)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def measure(n_sequences: int, n_steps: int) -> dict[str, float]:
    """Return the microseconds of a step in which every sequence decodes."""
    limits = Limits(
        max_num_seqs=n_sequences,
        max_num_batched_tokens=max(512, 2 * n_sequences),
        max_num_queued_reqs=0,
        max_model_len=n_steps + 64,
        n_cells=n_sequences * (n_steps + 64),
        vocab_size=VOCAB_SIZE,
    )
    core: Any = FreeCore(limits.n_cells, n_sequences)
    engine = LLMEngine(Executor(Worker(core, lambda **_: None)), limits, seed=0)  # type: ignore[arg-type,return-value]
    engine.check = lambda: None  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=n_steps + 20, ignore_eos=True)
    for i in range(n_sequences):
        request = EngineRequest(
            request_id=f"{i}",
            prompt_token_ids=[i, i + 1],
            params=params,
            eos_token_ids=(2,),
            arrival_s=0.0,
            deadline_s=1e9,
        )
        engine.submit(request)
    while engine.stats().step_decode_tokens < n_sequences:
        engine.step(time.perf_counter())
    taken = []
    for _ in range(n_steps):
        start_s = time.perf_counter()
        outputs = engine.step(start_s)
        taken.append(1e6 * (time.perf_counter() - start_s))
        assert len(outputs) == n_sequences
    taken.sort()
    return {
        "sequences": n_sequences,
        "steps": n_steps,
        "step_us_median": round(statistics.median(taken), 1),
        "step_us_p99": round(taken[int(0.99 * n_steps)], 1),
        "us_per_sequence": round(statistics.median(taken) / n_sequences, 2),
    }


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    flags = parser.parse_args()
    print(json.dumps(measure(flags.sequences, flags.steps)))


if __name__ == "__main__":
    main()
