"""LLAISYS as a peer: it executes timing commands from standard input through `LLM.generate`.

usage: peer_ours.py MODEL N_THREADS [--quantization int8|int4] [--temperature T] [--max-model-len N]
[--num-kv-cells N] [--kv-cache-dtype int8] [--encoder] [--timed]; then lines `decode STREAMS CONTEXT NEW`,
`shared STREAMS CONTEXT NEW`, `prefill TOKENS` or `embed TOKENS`, each with one line of JSON as the result.

`decode` returns the seconds of NEW steps of STREAMS sequences that start with CONTEXT tokens. This is the
difference of two calls with the same prompts, one of which generates NEW more tokens. So scheduling, sampling
and output processing are included, and the prompts are not (they are in the prefix cache). With `shared` all
streams have the same prompt. `--timed` adds `core_s`, the part spent in the core.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from llaisys import LLM, SamplingParams
from llaisys.engine import worker

VOCAB = 49000  # below both models' special tokens


class TimedContext:
    """Wraps the core's context and times its decodes."""

    seconds = 0.0

    def __init__(self, context: Any) -> None:
        self._context = context

    def decode(self, *arrays: Any, **masks: Any) -> Any:
        start = time.perf_counter()
        output = self._context.decode(*arrays, **masks)
        TimedContext.seconds += time.perf_counter() - start
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def time_the_core() -> None:
    """Make workers count the seconds that they spend in the core."""
    make = worker.Worker.__init__

    def timed(self: worker.Worker, context: Any, *others: Any) -> None:
        make(self, TimedContext(context), *others)

    worker.Worker.__init__ = timed  # type: ignore[method-assign]


class Ours:
    """One LLM; calls never stop early, and are greedy unless a temperature is set."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings: dict[str, Any] = {"quantization": args.quantization} if args.quantization else {}
        if not args.encoder:
            sizes = {"max_num_seqs": 32, "max_model_len": args.max_model_len}
            sizes |= {"num_kv_cells": args.num_kv_cells, "kv_cache_dtype": args.kv_cache_dtype}
            settings |= {**sizes, "speculative_config": None}
        self.llm = LLM(args.model, num_threads=args.threads, **settings)
        self.temperature, self.n_prefills = args.temperature, 0

    def generate(self, prompts: list[list[int]], n_new: int) -> tuple[float, float]:
        """Return the seconds of a call, and the part spent in the core."""
        params = SamplingParams(temperature=self.temperature, max_tokens=n_new, ignore_eos=True)
        start, core = time.perf_counter(), TimedContext.seconds
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        if any(len(output.outputs[0].token_ids) != n_new for output in outputs):
            sys.exit("a request returned fewer tokens than requested")
        return seconds, TimedContext.seconds - core

    def decode(self, n_streams: int, n_context: int, n_new: int) -> dict[str, float]:
        random.seed(n_context)
        return self.steps([random_prompt(n_context) for _ in range(n_streams)], n_new)

    def shared(self, n_streams: int, n_context: int, n_new: int) -> dict[str, float]:
        random.seed(n_context)
        return self.steps([random_prompt(n_context)] * n_streams, n_new)

    def steps(self, prompts: list[list[int]], n_new: int) -> dict[str, float]:
        """Return the seconds of `n_new` steps after the prompts."""
        self.generate(prompts, 1)  # from now on the prompts are in the prefix cache
        short, short_core = self.generate(prompts, 2)
        long, long_core = self.generate(prompts, 2 + n_new)
        return {"seconds": long - short, "core_s": long_core - short_core}

    def prefill(self, n_tokens: int) -> dict[str, float]:
        """Return the seconds of a prompt without a cached prefix, including one sampled token."""
        self.n_prefills += 1
        random.seed(-self.n_prefills)
        seconds, core = self.generate([random_prompt(n_tokens)], 1)
        return {"seconds": seconds, "core_s": core}

    def embed(self, n_tokens: int) -> dict[str, float]:
        """Return the seconds of an embedding."""
        prompt = [random.randrange(4, 600) for _ in range(n_tokens)]  # the encoder's vocabulary
        start = time.perf_counter()
        self.llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        return {"seconds": time.perf_counter() - start}


def random_prompt(n_tokens: int) -> list[int]:
    """Return random tokens."""
    return [random.randrange(VOCAB) for _ in range(n_tokens)]


def main() -> None:
    """Load, print `ready`, execute commands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    parser.add_argument("--quantization")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--num-kv-cells", type=int, default=40960)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--encoder", action="store_true")
    parser.add_argument("--timed", action="store_true")
    args = parser.parse_args()
    if args.timed:
        time_the_core()
    ours = Ours(args)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        print(json.dumps(getattr(ours, command)(*map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
