"""One model on the compiled core: flat arrays in, sampled ids out. The only importer of `llaisys._core`.

A worker is built, used and closed on one thread: the core checks it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llaisys.engine.outputs import TokenLogprobs
from llaisys.engine.request import BrokenInvariant, Request
from llaisys.errors import LlaisysError, RequestFailedError
from llaisys.types import GgufTokenizer, ModelInfo

if TYPE_CHECKING:
    from llaisys._core import Context, DecodeOutput, SamplerSpec

_LOGITS = 1  # `wants_output`: logits and a sampled id
_FAULTS = {
    "non_finite": "the model gave a number that is not finite for this request",
    "all_masked": "every token of this request was forbidden",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a context is made with; the names are those of `_core.Context`."""

    path: Path
    dtype: str
    kv_dtype: str
    isa: str
    n_cells: int
    n_seq_max: int
    n_batch: int
    max_model_len: int
    n_threads: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, from position `start`. `samples`: the last one gives an id."""

    seq_id: int
    start: int
    token_ids: list[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a chunk gave: an id if it samples, or the error that ends its request.

    `refused`: the core would not run it at all, even alone.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: LlaisysError | None = None
    refused: bool = False


class Worker:
    """Owns the context. Sequences are opened with their sampler and closed with their cells."""

    def __init__(self, context: Context, make_spec: Callable[..., SamplerSpec]) -> None:
        self._context = context
        self._make_spec = make_spec

    @property
    def vocab_size(self) -> int:
        """Logits of a row; token ids are below it."""
        return self._context.vocab_size

    @property
    def n_cells_used(self) -> int:
        """KV cells that hold a token."""
        return self._context.n_cells - self._context.n_cells_free

    def describe(self) -> str:
        """The machine side of the model, for one log line."""
        context = self._context
        return f"{context.isa}, {context.weight_bytes / 2**20:.0f} MiB of weights, {context.n_cells} KV cells"

    def open_sequence(self, request: Request) -> int:
        """Leases a sequence id and attaches the request's sampling. On an error nothing stays lent."""
        spec = self._make_spec(**_spec_arguments(request))
        n_prompt = len(request.source.prompt_token_ids)
        ids = np.array(request.token_ids, np.int32)
        seq_id = self._context.seq_acquire()
        try:
            self._context.set_sampler(seq_id, spec, ids[:n_prompt], ids[n_prompt:])
        except BaseException:
            self._context.seq_release(seq_id)
            raise
        return seq_id

    def close_sequence(self, seq_id: int) -> None:
        """Returns the id, its cells and its sampler."""
        self._context.seq_release(seq_id)

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """One decode of all chunks (one FFI crossing, GIL released); results in the order of the chunks.

        Raises what the core raises; then nothing has changed.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wants = bytearray()
        for chunk in chunks:
            tokens += chunk.token_ids
            positions += range(chunk.start, chunk.start + len(chunk.token_ids))
            wants += bytes(len(chunk.token_ids))
            wants[-1] = _LOGITS if chunk.samples else 0
        lengths = np.array([len(chunk.token_ids) for chunk in chunks])
        output = self._context.decode(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.ones(len(tokens), np.int32),
            np.repeat(np.array([chunk.seq_id for chunk in chunks], np.int64), lengths),
            np.frombuffer(wants, np.uint8),
        )
        return _results(chunks, output)

    def check(self) -> None:
        """Checks the core's invariants; raises EngineDeadError if one is broken."""
        self._context.check_integrity()

    def close(self) -> None:
        """Frees the context; idempotent."""
        self._context.close()


def open_worker(settings: WorkerSettings) -> Worker:
    """Loads the model. Call it on the thread that will use it. Raises RejectedError or UnsupportedError."""
    from llaisys import _core  # here, so that planning, `--help` and their tests need no compiled core

    context = _core.Context(
        str(settings.path),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        isa=settings.isa,
        n_cells=settings.n_cells,
        n_seq_max=settings.n_seq_max,
        n_batch=settings.n_batch,
        max_model_len=settings.max_model_len,
        n_threads=settings.n_threads,
    )
    return Worker(context, _core.SamplerSpec)


def available_isas() -> list[str]:
    """Instruction sets that this machine can run, best first."""
    from llaisys import _core  # as in `open_worker`

    return _core.available_isas()


def inspect_model(path: Path) -> ModelInfo:
    """Facts of a checkpoint from its headers. Raises RejectedError (damaged) or UnsupportedError."""
    from llaisys import _core  # as in `open_worker`

    facts: dict[str, Any] = json.loads(_core.inspect(str(path)))
    tokenizer = facts.pop("tokenizer")
    return ModelInfo(**facts, tokenizer=None if tokenizer is None else GgufTokenizer(**tokenizer))


def _spec_arguments(request: Request) -> dict[str, Any]:
    params = request.source.params
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": list(params.logit_bias.items()),
        "min_tokens": params.min_tokens,
        "stop_ids": list(request.stop_ids),
        "seed": request.seed,
        "top_logprobs": -1 if params.logprobs is None else params.logprobs,
    }


def _results(chunks: Sequence[Chunk], output: DecodeOutput) -> list[ChunkResult]:
    """Output rows come in batch order, one for each chunk that samples."""
    ids: list[int] = output.token_ids.tolist()
    n_rows = sum(chunk.samples for chunk in chunks)
    if len(ids) != n_rows:
        raise BrokenInvariant(f"the core gave {len(ids)} ids for {n_rows} rows")
    logprobs = {
        row: TokenLogprobs(ids[row], logprob, rank, top) for row, logprob, rank, top in output.logprobs
    }
    faults = dict(output.faults)
    results: list[ChunkResult] = []
    row_end, n_sampled = 0, 0
    for chunk in chunks:
        row_end += len(chunk.token_ids)
        if not chunk.samples:
            results.append(ChunkResult())
            continue
        fault = faults.get(row_end - 1)
        if fault is not None:
            results.append(ChunkResult(error=RequestFailedError(_FAULTS.get(fault, fault))))
        else:
            results.append(ChunkResult(ids[n_sampled], logprobs.get(n_sampled)))
        n_sampled += 1
    return results
