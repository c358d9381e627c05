"""The loss of quantization, compared with llama.cpp: mean KL divergence to float32 over 5,120 teacher-forced
tokens.

usage: quality.py [--peer-python .venv-peers/bin/python] [--threads N] [--out FILE]

Three sources, each compared with its own weights in float32:
- `file`: SmolLM2's GGUF, in the default mode of each engine.
- `bf16`: its weights dequantized to BF16, then quantized by each engine. They are close to the grid of the
  original file (Q4_1 with groups of 32 inputs, head Q8_0). This favors a quantizer with groups of 32.
- `shuffled`: the same function with the channels between the matrices permuted, so that no group of 32 is one
  of the file's groups. So no weight is close to a grid, as in weights that were never quantized.

The interval is the 95 % bootstrap interval of the mean over tokens (2,000 resamples). `make bench-quality`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llaisys._core import Context
from llaisys.engine.worker import inspect_model
from llaisys.hub import resolve_model
from llaisys.text.tokenizer import load_tokenizer

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))

from parity.float_gguf import shuffled, write_bf16  # noqa: E402 -- found by the line above
from parity.gguf_files import read_tensors  # noqa: E402 -- as above

TEXTS = ("mixed.txt", "notes.txt")
N_WINDOWS, WINDOW = 10, 512
N_RESAMPLES = 2000
# Source, our mode, llama.cpp's type (None: the file as it is).
PAIRS = (
    ("file", "auto", None),
    ("bf16", "int8", "Q8_0"),
    ("bf16", "int4", "Q4_K_M"),
    ("shuffled", "int8", "Q8_0"),
    ("shuffled", "int4", "Q4_K_M"),
)

Logits = NDArray[np.float32]


def read_windows(model: Path) -> NDArray[np.int32]:
    tokenizer = load_tokenizer(inspect_model(str(model)))
    texts = HERE.parent / "tests" / "data" / "text"
    text = "".join((texts / name).read_text("utf-8") for name in TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return np.array(ids[: N_WINDOWS * WINDOW], np.int32).reshape(N_WINDOWS, WINDOW)


def our_logits(model: Path, mode: str, windows: NDArray[np.int32], out: Path, n_threads: int) -> float:
    """Write the logits `[windows, tokens, vocab]`; return bits per weight."""
    info = inspect_model(str(model))
    shape = (*windows.shape, info.vocab_size)
    logits = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    context = Context(
        str(model), dtype=mode, n_cells=1024, n_seq_max=1, n_batch=512, max_model_len=512, n_threads=n_threads
    )
    n = windows.shape[1]
    for window, rows in zip(windows, logits, strict=True):
        seq = context.seq_acquire()
        given = (window, np.arange(n, dtype=np.int32), np.ones(n, np.int32), np.full(n, seq, np.int64))
        rows[:] = context.decode(*given, np.ones(n, np.uint8), return_logits=True).logits
        context.seq_release(seq)
    context.close()
    return info.packed_bytes[mode] * 8 / info.n_parameters


def divergence(reference: Path, other: Path) -> tuple[NDArray[np.float64], float]:
    """Return KL(reference || other) of every token, and the fraction with the same best token."""
    kl, same = [], []
    pair = (np.load(path, mmap_mode="r") for path in (reference, other))
    for p, q in zip(*pair, strict=True):
        log_p, log_q = (_log_softmax(np.asarray(x)) for x in (p, q))
        kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1, dtype=np.float64))
        same.append(log_p.argmax(-1) == log_q.argmax(-1))
    return np.concatenate(kl), float(np.concatenate(same).mean())


def _log_softmax(x: Logits) -> Logits:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True, dtype=np.float32))


def summary(kl: NDArray[np.float64], same: float) -> dict[str, object]:
    rng = np.random.default_rng(0)
    means = np.sort([rng.choice(kl, len(kl)).mean() for _ in range(N_RESAMPLES)])
    low, high = means[N_RESAMPLES // 40], means[-N_RESAMPLES // 40]
    return {
        "mean_kl": round(float(kl.mean()), 6),
        "interval": [round(float(low), 6), round(float(high), 6)],
        "median_kl": round(float(np.median(kl)), 6),
        "same_best_token": round(same, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=".venv-peers/bin/python")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "quality.json")
    args = parser.parse_args()

    def peer(command: str, *words: object) -> str:
        line = [args.peer_python, str(HERE / "quality_llama_cpp.py"), command, *map(str, words)]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    own = Path(resolve_model("smollm2").path)
    windows, rows = read_windows(own), []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        np.save(scratch / "ids.npy", windows)
        tensors = read_tensors(own)
        sources = {
            "file": own,
            "bf16": write_bf16(own, scratch / "bf16.gguf", tensors),
            "shuffled": write_bf16(
                own, scratch / "shuffled.gguf", shuffled(tensors, inspect_model(str(own)))
            ),
        }
        reference, logits, quantized = (scratch / name for name in ("ref.npy", "logits.npy", "q.gguf"))
        of = None
        for source, mode, kind in PAIRS:
            model = sources[source]
            if of != source:
                our_logits(model, "float32", windows, reference, args.threads)
                of = source
            bits = our_logits(model, mode, windows, logits, args.threads)
            ours = {"bits_a_weight": round(bits, 3), **summary(*divergence(reference, logits))}
            rows.append({"source": source, "engine": "llaisys", "format": mode, **ours})
            print(rows[-1], flush=True)
            if kind is not None:
                peer("quantize", model, quantized, f"MOSTLY_{kind}", args.threads)
                model = quantized
            version = peer("logits", model, scratch / "ids.npy", logits, args.threads)
            info = inspect_model(str(model))
            bits = info.weight_bytes * 8 / info.n_parameters
            theirs = {"bits_a_weight": round(bits, 3), **summary(*divergence(reference, logits))}
            rows.append(
                {"source": source, "engine": f"llama.cpp {version}", "format": kind or "as it is", **theirs}
            )
            print(rows[-1], flush=True)
    result = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": own.name,
        "tokens": int(windows.size),
        "window": WINDOW,
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
