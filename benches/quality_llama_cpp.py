"""llama.cpp's logits and its quantizer, for `quality.py`. Runs in the peers' environment.

usage: quality_llama_cpp.py logits MODEL.gguf IDS.npy OUT.npy N_THREADS
       quality_llama_cpp.py quantize SOURCE.gguf TARGET.gguf FTYPE N_THREADS

IDS.npy has windows of token ids, int32 `[n, T]`; OUT.npy gets the logits, float32 `[n, T, vocab]`, each
window in one batch on an empty cache. FTYPE is a name of llama.cpp's (`MOSTLY_Q8_0`). Prints the version.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp
import numpy as np


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(_level: int, _text: bytes, _data: object) -> None:
    """Discard llama.cpp's log."""


def logits(path: str, ids_file: str, out_file: str, n_threads: str) -> None:
    windows = np.load(ids_file)
    n, length = windows.shape
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = length
    params.n_threads = params.n_threads_batch = int(n_threads)
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    out = np.lib.format.open_memmap(out_file, "w+", np.float32, (n, length, n_vocab))
    batch = llama_cpp.llama_batch_init(length, 0, 1)
    for window, rows in zip(windows, out, strict=True):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = length
        for i, token in enumerate(window):
            batch.token[i], batch.pos[i] = int(token), i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        pointer = llama_cpp.llama_get_logits(context)
        rows[:] = np.ctypeslib.as_array(pointer, shape=(length, n_vocab))
    out.flush()


def quantize(source: str, target: str, ftype: str, n_threads: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{ftype}")
    params.nthread = int(n_threads)
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        sys.exit("llama_model_quantize failed")


def main() -> None:
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_SILENT, None)
    {"logits": logits, "quantize": quantize}[sys.argv[1]](*sys.argv[2:])
    print(llama_cpp.__version__)


if __name__ == "__main__":
    main()
