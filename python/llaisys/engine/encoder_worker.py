"""EncoderWorker: runs one encoder on the compiled core, whole texts in and hidden states or scores out.

With `worker`, this is the only importer of `llaisys._core`. A worker is built, used and closed on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llaisys.engine.load_progress import model_load
from llaisys.engine.memory import WorkerSettings
from llaisys.engine.request import Request
from llaisys.engine.worker import core_watchdog

if TYPE_CHECKING:
    from llaisys._core import Encoder
    from llaisys._core import Watchdog as Watchdog


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the model computed for one text.

    `hidden`: the final hidden states `[n, d_model]`. `logit`: the classifier's output, if there is one.
    """

    hidden: NDArray[np.float32]
    logit: float | None


class EncoderWorker:
    """Owns the core's encoder. Nothing is kept between calls, so a call that fails has no side effects."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def describe(self) -> str:
        """Return instruction set and bytes of weights, for the log."""
        return f"{self._encoder.isa}, {self._encoder.weight_bytes / 2**20:.0f} MiB of weights"

    def encode(self, requests: Sequence[Request]) -> list[Encoded]:
        """Compute the prompts of requests in one call, with the GIL released. Raises the core's errors."""
        lengths = [len(request.token_ids) for request in requests]
        tokens = np.concatenate([np.array(request.token_ids, np.int32) for request in requests])
        types = np.concatenate([_types_of(request) for request in requests])
        hidden, scores = self._encoder.encode(tokens, types, np.array(lengths, np.int64))
        ends = np.cumsum(lengths).tolist()
        logits = [None] * len(requests) if scores is None else scores.tolist()
        return [
            Encoded(hidden[end - length : end], logit)
            for end, length, logit in zip(ends, lengths, logits, strict=True)
        ]

    def watchdog(self, window_s: float, exit_after_s: float | None) -> Watchdog:
        """Return a watchdog of this encoder, as `Worker.watchdog`."""
        return core_watchdog(self._encoder.progress(), window_s, exit_after_s)

    def close(self) -> None:
        """Free the encoder; idempotent."""
        self._encoder.close()


def open_encoder(settings: WorkerSettings) -> EncoderWorker:
    """Load the model. Call it on the thread that will use it. Raises RejectedError or UnsupportedError."""
    from llaisys import _core  # as in `open_worker`

    progress = _core.Progress()
    with model_load(settings, lambda: progress.loading):
        encoder = _core.Encoder(
            str(settings.path),
            progress=progress,
            dtype=settings.dtype,
            isa=settings.isa,
            n_batch=settings.n_batch,
            max_model_len=settings.max_model_len,
            n_threads=settings.n_threads,
            pins=settings.pins,
        )
    return EncoderWorker(encoder)


def _types_of(request: Request) -> NDArray[np.int32]:
    """Return the token types: 0, and 1 from the second text of a pair on."""
    types = np.zeros(len(request.token_ids), np.int32)
    if request.source.second_segment is not None:
        types[request.source.second_segment :] = 1
    return types
