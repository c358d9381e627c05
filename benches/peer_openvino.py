"""OpenVINO GenAI as a peer: it executes timing commands from standard input. Runs in the peers' environment.

usage: peer_openvino.py FOLDER N_THREADS; then lines `decode STREAMS CONTEXT NEW` or `prefill TOKENS`, each
with one line of JSON as the result, with the `seconds`.

It uses the continuous batching pipeline (paged attention; the head computes the needed rows only). The
pipeline is stepped until every sequence has its first token, and then timed for NEW steps. Prompts of
`decode` are in the prefix cache from their second round on. Greedy, latency hint; bf16 inference hint and
bf16 KV where the CPU multiplies bf16, else OpenVINO's defaults.
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

VOCAB = 49000


def precisions() -> dict[str, str]:
    """Return the types to compute and to store KV in; without bf16 instructions OpenVINO refuses bf16."""
    if "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return {}
    return {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}


class Peer:
    """One pipeline."""

    def __init__(self, folder: str, n_threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(
            folder,
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": n_threads, "PERFORMANCE_HINT": "LATENCY", **precisions()},
        )
        self.n_requests = 0

    def add(self, n_tokens: int, n_new: int, seed: int) -> genai.GenerationHandle:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n_new, True, False
        self.n_requests += 1
        random.seed(seed)
        ids = np.array([[random.randrange(VOCAB) for _ in range(n_tokens)]])
        return self.pipeline.add_request(self.n_requests, ov.Tensor(ids), config)

    def finish(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()

    def decode(self, n_streams: int, n_context: int, n_new: int) -> float:
        # Those that start first may be some steps ahead when the last has its first token.
        spare = 8 + n_streams * n_context // 2048
        handles = [self.add(n_context, n_new + spare, 1000 * n_context + i) for i in range(n_streams)]
        while not all(handle.can_read() for handle in handles):
            self.pipeline.step()
        self.pipeline.step()
        start = time.perf_counter()
        for _ in range(n_new):
            self.pipeline.step()
        seconds = time.perf_counter() - start
        self.finish()
        return seconds

    def prefill(self, n_tokens: int) -> float:
        start = time.perf_counter()
        handle = self.add(n_tokens, 1, -self.n_requests)  # a request whose handle is gone is dropped
        self.finish()
        seconds = time.perf_counter() - start
        if not handle.can_read():
            sys.exit("the pipeline gave no token")
        return seconds


def main() -> None:
    """Load, print `ready`, execute commands."""
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        print(json.dumps({"seconds": getattr(peer, command)(*map(int, numbers))}), flush=True)


if __name__ == "__main__":
    main()
