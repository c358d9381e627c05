"""llama.cpp as a peer: answers timing commands on standard input. Runs in the peers' environment.

usage: peer_llama_cpp.py MODEL.gguf N_THREADS; then lines `decode PROMPT_TOKENS NEW_TOKENS` or
`prefill TOKENS`; each is answered with one line: tokens a second.
"""

from __future__ import annotations

import ctypes
import sys
import time

import llama_cpp
import numpy as np


class Peer:
    """One context; a step is `llama_decode` of the C API and an argmax over the logits."""

    def __init__(self, path: str, n_threads: int) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_SILENT, None)
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2048, 512, 512
        params.n_threads = params.n_threads_batch = n_threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def step(self, tokens: list[int]) -> int:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.n_vocab,)).argmax())

    def decode(self, n_prompt: int, n_new: int) -> float:
        self.clear()
        token = self.step([100 + i for i in range(n_prompt)])
        start = time.perf_counter()
        for _ in range(n_new):
            token = self.step([token])
        return n_new / (time.perf_counter() - start)

    def prefill(self, n_tokens: int) -> float:
        self.clear()
        start = time.perf_counter()
        self.step([100 + i for i in range(n_tokens)])
        return n_tokens / (time.perf_counter() - start)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(_level: int, _text: bytes, _data: object) -> None:
    """llama.cpp's log goes nowhere."""


def main() -> None:
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print("ready", llama_cpp.__version__, flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        print(getattr(peer, command)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main()
