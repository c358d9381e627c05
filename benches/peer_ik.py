"""ik_llama.cpp as a peer: it executes timing commands from standard input. Runs in the peers' environment.

usage: peer_ik.py MODEL.gguf N_THREADS [N_CELLS [q8_0]]; then lines `decode STREAMS CONTEXT NEW`, `shared
STREAMS CONTEXT NEW` (the same) or `prefill TOKENS`, each with one line of JSON as the result, with the
`seconds`.

A step is one `llama_decode` of the C API with one token of each sequence, as its llama-batched-bench does.
(The Python package has the library without that tool.) Nothing is sampled; the next tokens are given. The
prompt is computed once and shared by the sequences. Weights are repacked at load (`-rtr`), flash attention
and fused ops are on. Cells are f16, with `q8_0` in 8 bits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

from ik_llama_cpp import _ctypes_api as api


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(_level: int, _text: bytes, _data: object) -> None:
    """Discard its log."""


class Peer:
    """One context for 32 sequences."""

    n_batch = 2048

    def __init__(self, path: str, n_threads: int, n_cells: int = 4096, cell_type: str = "f16") -> None:
        api._lib.llama_log_set(_silent, None)
        api._lib.llama_kv_cache_seq_rm.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 3]
        api._lib.llama_kv_cache_seq_cp.argtypes = [ctypes.c_void_p, *[ctypes.c_int32] * 4]
        api.llama_backend_init()
        of_model = api.llama_model_default_params()
        of_model.use_mmap, of_model.repack_tensors = False, True
        self.model = api.llama_model_load_from_file(path.encode(), of_model)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_cells, self.n_batch, 512, 32
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn = params.fused_up_gate = True
        params.type_k = params.type_v = {"f16": 1, "q8_0": 8}[cell_type]  # ggml_type
        self.context = api.llama_init_from_model(self.model, params)
        self.batch = api.llama_batch_init(self.n_batch, 0, 1)
        self.n_prompt = 0

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One decode of rows (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        api.llama_get_logits_ith(self.context, len(rows) - 1)

    def prompt(self, n_tokens: int) -> None:
        api.llama_kv_cache_clear(self.context)
        self.n_prompt = n_tokens
        rows = [(100 + i % 40_000, i, 0, i == n_tokens - 1) for i in range(n_tokens)]
        for start in range(0, n_tokens, self.n_batch):
            self.run(rows[start : start + self.n_batch])

    def decode(self, n_streams: int, n_context: int, n_new: int) -> float:
        if n_context == self.n_prompt:
            for sequence in range(32):
                api._lib.llama_kv_cache_seq_rm(self.context, sequence, n_context if sequence == 0 else 0, -1)
        else:
            self.prompt(n_context)
        for sequence in range(1, n_streams):
            api._lib.llama_kv_cache_seq_cp(self.context, 0, sequence, -1, -1)
        steps = [
            [(100 + 37 * i + s, n_context + i, s, True) for s in range(n_streams)] for i in range(n_new + 1)
        ]
        self.run(steps[0])
        start = time.perf_counter()
        for rows in steps[1:]:
            self.run(rows)
        return time.perf_counter() - start

    shared = decode

    def prefill(self, n_tokens: int) -> float:
        start = time.perf_counter()
        self.prompt(n_tokens)
        return time.perf_counter() - start


def main() -> None:
    """Load, print `ready`, execute commands. The library's own output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, n_threads, *cells = sys.argv[1:]
    peer = Peer(path, int(n_threads), *map(int, cells[:1]), *cells[1:])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        seconds = getattr(peer, command)(*map(int, numbers))
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
