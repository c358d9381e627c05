"""Executor: runs the batch of a step on the worker, and isolates the request that makes a batch fail."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from llaisys.engine.batch import Batch, StepResult
from llaisys.engine.worker import Worker
from llaisys.errors import EngineDeadError, LlaisysError, RequestFailedError
from llaisys.outputs import RequestId

log = logging.getLogger(__name__)

# The engine counts as broken if half of a batch of at least this many items fail even when run alone.
_SUSPICIOUS_ITEMS = 4
# It also counts as broken if this many different requests are rejected within this many seconds.
_SUSPICIOUS_REQUESTS = 5
_SUSPICIOUS_S = 60.0


@dataclass(slots=True)
class _Tries:
    """The number of further parts of one failing batch that may be run as a whole."""

    left: int


class Executor:
    """Runs batches on one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Recently rejected requests: time and id.
        self._rejections: deque[tuple[float, RequestId]] = deque()

    @property
    def worker(self) -> Worker:
        """The worker, for its properties and cells."""
        return self._worker

    def execute_model(self, batch: Batch, now_s: float) -> StepResult:
        """Compute the batch; an item that the core rejects gets its error, the others get their tokens.

        A failing decode has no side effects, and a row's result does not depend on the other rows. So running
        both halves again gives the valid items their usual tokens. One failing item costs at most
        `2 ceil(log2 n)` runs; after that the remaining items are run one by one.

        Raises EngineDeadError if the core is dead, rejects half of a batch item by item, or rejects five
        requests within a minute. An invalid row (`non_finite`, `all_masked`) ends only its request.
        """
        try:
            return self._worker.execute_model(batch)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            n_tries = 2 * (len(batch) - 1).bit_length()
            result = self._isolate(batch, error, _Tries(n_tries))
            if not result.rejected:
                log.warning("a batch of %d items failed as a whole but not in parts: %s", len(batch), error)
        self._raise_if_broken(batch, result, now_s)
        return result

    def _isolate(self, batch: Batch, error: LlaisysError, tries: _Tries) -> StepResult:
        """Return the results of items that failed together with `error`: an error for each failing item,
        tokens for the others."""
        n = len(batch)
        if n == 1:
            alone = RequestFailedError(f"the core rejected this request's rows: {error}")
            return StepResult([-1], errors={0: alone}, rejected=[0])
        tries.left -= 2
        edges = [0, n // 2, n] if tries.left >= 0 else list(range(n + 1))
        result = StepResult([])
        for first, end in pairwise(edges):
            part = batch.part(first, end)
            try:
                result.extend(self._worker.execute_model(part))
            except EngineDeadError:
                raise
            except LlaisysError as again:
                result.extend(self._isolate(part, again, tries))
        return result

    def _raise_if_broken(self, batch: Batch, result: StepResult, now_s: float) -> None:
        """Raise EngineDeadError if the number of rejected items shows that the engine is broken."""
        n_rejected = len(result.rejected)
        if len(batch) >= _SUSPICIOUS_ITEMS and 2 * n_rejected >= len(batch):
            raise EngineDeadError(
                f"{n_rejected} of {len(batch)} requests were rejected by the core in one step"
            )
        self._rejections += [(now_s, batch.request(item).request_id) for item in result.rejected]
        while self._rejections and self._rejections[0][0] < now_s - _SUSPICIOUS_S:
            self._rejections.popleft()
        if len({request_id for _, request_id in self._rejections}) >= _SUSPICIOUS_REQUESTS:
            raise EngineDeadError(
                f"{_SUSPICIOUS_REQUESTS} requests were rejected by the core within {_SUSPICIOUS_S:.0f} s"
            )

    def check(self) -> None:
        """Verify the core's counts; raises EngineDeadError if they are wrong."""
        self._worker.check()

    def close(self) -> None:
        """Free the core; idempotent."""
        self._worker.close()
