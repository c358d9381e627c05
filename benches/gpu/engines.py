"""Our engine on the device, and the references for its tokens."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from common import Skip, is_importable
from numpy.typing import NDArray

import llaisys
from llaisys import LLM

Ids = list[int]
Logits = NDArray[np.float32]


def ours(folder: Path, **settings: Any) -> LLM:
    """Return the model on the first GPU, in bf16. Raises Skip if CUDA cannot be used."""
    info = llaisys.cuda_info()
    if info.reason is not None:
        raise Skip(f"CUDA cannot be used: {info.reason}")
    return LLM(str(folder), device="cuda", dtype="bfloat16", **settings)


class Reference(Protocol):
    """A reference: greedy completions of prompts of equal length, and logits `[len(ids), vocab]` of text."""

    name: str

    def continued(self, prompts: Sequence[Ids], n_tokens: int) -> list[Ids]: ...

    def logits(self, ids: Ids) -> Logits: ...

    def close(self) -> None: ...


def reference(folder: Path, dtype: str, dry_run: bool) -> Reference:
    """Return transformers on the GPU; in a dry run without it, our CPU backend. Raises Skip.

    `dtype` is `bfloat16` or `float32`.
    """
    if is_importable("torch") and is_importable("transformers"):
        import torch

        if torch.cuda.is_available() or dry_run:
            return Transformers(folder, dtype)
    if dry_run:
        return OurCpu(folder, dtype)
    raise Skip("transformers with a GPU is needed for the reference")


class Transformers:
    """`generate` of transformers with sdpa; end-of-text tokens do not stop it."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        made = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._model = made.to(self._device).eval()
        self._model.generation_config.eos_token_id = None
        self.name = f"transformers on {self._device}"
        assert not torch.backends.cuda.matmul.allow_tf32, "float32 is the exact reference"

    def continued(self, prompts: Sequence[Ids], n_tokens: int) -> list[Ids]:
        given = self._torch.tensor(prompts, device=self._device)
        made = self._model.generate(
            given, attention_mask=self._torch.ones_like(given), max_new_tokens=n_tokens, do_sample=False
        )
        ids: list[Ids] = made[:, given.shape[1] :].tolist()
        return ids

    def logits(self, ids: Ids) -> Logits:
        with self._torch.inference_mode():
            given = self._torch.tensor([ids], device=self._device)
            made: Logits = self._model(given).logits[0].float().cpu().numpy()
        return made

    def close(self) -> None:
        del self._model
        gc.collect()
        if self._device == "cuda":
            self._torch.cuda.empty_cache()


class OurCpu:
    """Our CPU backend, for dry runs. It shares no arithmetic with the device, but other code."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from llaisys._core import Context

        self.name = "our CPU backend"
        self._context = Context(
            str(folder),
            dtype=dtype,
            n_cells=512,
            n_seq_max=1,
            n_batch=512,
            max_model_len=512,
            n_threads=1,
        )

    def continued(self, prompts: Sequence[Ids], n_tokens: int) -> list[Ids]:
        return [self._continued(prompt, n_tokens) for prompt in prompts]

    def _continued(self, prompt: Ids, n_tokens: int) -> Ids:
        ids = list(prompt)
        for _ in range(n_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def logits(self, ids: Ids) -> Logits:
        n, seq = len(ids), self._context.seq_acquire()
        given = (
            np.array(ids, np.int32),
            np.arange(n, dtype=np.int32),
            np.ones(n, np.int32),
            np.full(n, seq, np.int64),
        )
        made = self._context.decode(*given, np.ones(n, np.uint8), return_logits=True).logits
        self._context.seq_release(seq)
        assert made is not None
        return made

    def close(self) -> None:
        self._context.close()
