"""DraftModelProposer: drafts of a second, smaller model with the same vocabulary (Leviathan et al.,
arXiv:2211.17192), greedy and batched over requests. It runs on a worker of its own."""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from llaisys.engine.prefix_tree import n_common
from llaisys.engine.request import Request
from llaisys.engine.worker import Worker
from llaisys.errors import ExhaustedError, LlaisysError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sequence:
    """A request's sequence of the draft model. `token_ids`: its tokens with K and V."""

    seq_id: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class _Rows:
    """The rows of one decode, and the sequences whose last row samples, in order."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    added: list[tuple[_Sequence, Sequence[int]]] = field(default_factory=list)

    def add(self, sequence: _Sequence, token_ids: Sequence[int], *, samples: bool) -> None:
        """Append tokens to a sequence. `samples`: its last row samples the next token."""
        n, start = len(token_ids), len(sequence.token_ids)
        self.tokens += token_ids
        self.positions += range(start, start + n)
        self.seq_ids += [sequence.seq_id] * n
        self.samples += [False] * (n - 1) + [samples]
        self.added.append((sequence, token_ids))


class DraftModelProposer:
    """Drafts with a second model.

    - `n_batch`: rows of one decode. A request whose missing tokens do not fit gets no drafts until later
      steps have computed them.
    - A failure of the draft model ends the drafts, never a request.
    """

    def __init__(self, worker: Worker, n_batch: int, max_model_len: int) -> None:
        self._worker = worker
        self._n_batch, self._max_model_len = n_batch, max_model_len
        # By ordinal, the least recently used first.
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()
        self._has_failed = False
        worker.decode_seconds(1)
        self._seconds_per_draft = min(worker.decode_seconds(1) for _ in range(3))

    @property
    def seconds_per_draft(self) -> float:
        """Seconds of one more draft for all requests: a decode of the draft model."""
        return self._seconds_per_draft

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        """Return the drafts of each request; see `Proposer`."""
        if not self._has_failed:
            try:
                return self._propose(requests, budgets)
            except ExhaustedError:
                self._close_unused(requests)
            except LlaisysError as error:
                log.warning("the draft model failed and is not used any more: %s", error)
                self._has_failed = True
        return [[] for _ in requests]

    def finish(self, request: Request) -> None:
        """Close the sequence of a request."""
        if (sequence := self._sequences.pop(request.ordinal, None)) is not None:
            self._worker.close_sequence(sequence.seq_id)

    def close(self) -> None:
        """Free the draft model; idempotent."""
        self._worker.close()

    def _propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        rows, drafting = _Rows(), []
        for i, (request, budget) in enumerate(zip(requests, budgets, strict=True)):
            n_left = self._n_batch - len(rows.tokens)
            if not budget or not n_left or len(request.token_ids) + budget > self._max_model_len:
                continue
            sequence = self._sequence(request)
            missing = self._trim(sequence, request.token_ids)
            rows.add(sequence, missing[:n_left], samples=len(missing) <= n_left)
            if len(missing) <= n_left:
                drafting.append((i, sequence))
        while drafting:
            begin_s = time.perf_counter()
            next_ids = self._decode(rows)
            if len(rows.tokens) == len(drafting):
                self._observe(time.perf_counter() - begin_s)
            for (i, _), token_id in zip(drafting, next_ids, strict=True):
                drafts[i].append(token_id)
            drafting = [(i, sequence) for i, sequence in drafting if len(drafts[i]) < budgets[i]]
            rows = _Rows()
            for i, sequence in drafting:
                rows.add(sequence, drafts[i][-1:], samples=True)
        if rows.tokens:
            self._decode(rows)
        return drafts

    def _observe(self, seconds: float) -> None:
        """Record the seconds of a decode with one row per request; one slow decode counts little."""
        known = self._seconds_per_draft
        self._seconds_per_draft += 0.1 * (min(seconds, 4 * known) - known)

    def _sequence(self, request: Request) -> _Sequence:
        """Return the request's sequence, a new one if needed."""
        sequence = self._sequences.get(request.ordinal)
        if sequence is None:
            if not self._worker.n_seq_free:
                _, oldest = self._sequences.popitem(last=False)
                self._worker.close_sequence(oldest.seq_id)
            sequence = self._sequences[request.ordinal] = _Sequence(self._worker.open_greedy_sequence())
        self._sequences.move_to_end(request.ordinal)
        return sequence

    def _trim(self, sequence: _Sequence, token_ids: array[int]) -> array[int]:
        """Trim the sequence to its common prefix with `token_ids`, less the last token; return the missing
        tokens."""
        n_kept = min(n_common(sequence.token_ids, token_ids), len(token_ids) - 1)
        if n_kept < len(sequence.token_ids):
            self._worker.trim_sequence(sequence.seq_id, n_kept)
            del sequence.token_ids[n_kept:]
        return token_ids[n_kept:]

    def _decode(self, rows: _Rows) -> list[int]:
        """Decode rows; return the sampled ids in the order of the sequences that sample."""
        ids = self._worker.decode_greedy(rows.tokens, rows.positions, rows.seq_ids, rows.samples)
        for sequence, token_ids in rows.added:
            sequence.token_ids.extend(token_ids)
        return ids

    def _close_unused(self, requests: Sequence[Request]) -> None:
        """Close the sequences of other requests, because the draft model has too few cells."""
        used = {request.ordinal for request in requests}
        for ordinal in [ordinal for ordinal in self._sequences if ordinal not in used]:
            self._worker.close_sequence(self._sequences.pop(ordinal).seq_id)
