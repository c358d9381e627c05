"""Carries a step out on the worker, and finds the row that a failing step fails for."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from llaisys.engine.worker import Batch, StepResult, Worker
from llaisys.errors import EngineDeadError, LlaisysError, RequestFailedError
from llaisys.types import RequestId

log = logging.getLogger(__name__)

# Of so many items or more, half failing alone means that the engine is broken and not its requests.
_SUSPICIOUS_ITEMS = 4
# So many different requests refused within so many seconds mean the same.
_SUSPICIOUS_REQUESTS = 5
_SUSPICIOUS_S = 60.0


@dataclass(slots=True)
class _Tries:
    """How often parts of one failing batch may still be run together."""

    left: int


class Executor:
    """One worker now; ranks and models of several workers stand behind the same calls later."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # Requests that were refused lately: when, and which.
        self._refusals: deque[tuple[float, RequestId]] = deque()

    @property
    def worker(self) -> Worker:
        """The worker, for its facts and its cells."""
        return self._worker

    def run(self, batch: Batch, now_s: float) -> StepResult:
        """Computes the batch; an item that the core fails on gets its error, the others their tokens.

        A failing decode has changed nothing, and a row's result does not depend on its company, so running
        the halves again gives the innocent the tokens they would have had. One culprit costs at most
        2 ceil(log2 n) runs; what is still together then is run item by item.

        Raises EngineDeadError: the core is lost, or refuses half of a batch item by item, or five requests
        within a minute. A row that merely came out wrong (`non_finite`, `all_masked`) is its request's
        affair.
        """
        try:
            return self._worker.run(batch)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            n_tries = 2 * (len(batch) - 1).bit_length()
            result = self._isolate(batch, error, _Tries(n_tries))
            if not result.refused:
                log.warning("a batch of %d items failed together and not in parts: %s", len(batch), error)
        self._judge(batch, result, now_s)
        return result

    def _isolate(self, batch: Batch, error: LlaisysError, tries: _Tries) -> StepResult:
        """Results of items that failed together with `error`: the culprit its own, the others tokens."""
        n = len(batch)
        if n == 1:
            alone = RequestFailedError(f"the core refused this request's rows: {error}")
            return StepResult([-1], errors={0: alone}, refused=[0])
        tries.left -= 2
        edges = [0, n // 2, n] if tries.left >= 0 else list(range(n + 1))
        result = StepResult([])
        for first, end in pairwise(edges):
            part = batch.part(first, end)
            try:
                result.extend(self._worker.run(part))
            except EngineDeadError:
                raise
            except LlaisysError as again:
                result.extend(self._isolate(part, again, tries))
        return result

    def _judge(self, batch: Batch, result: StepResult, now_s: float) -> None:
        """Raises EngineDeadError where so many are refused that they cannot be to blame."""
        n_refused = len(result.refused)
        if len(batch) >= _SUSPICIOUS_ITEMS and 2 * n_refused >= len(batch):
            raise EngineDeadError(
                f"{n_refused} of {len(batch)} requests were refused by the core in one step"
            )
        self._refusals += [(now_s, batch.request(item).request_id) for item in result.refused]
        while self._refusals and self._refusals[0][0] < now_s - _SUSPICIOUS_S:
            self._refusals.popleft()
        if len({request_id for _, request_id in self._refusals}) >= _SUSPICIOUS_REQUESTS:
            raise EngineDeadError(
                f"{_SUSPICIOUS_REQUESTS} requests were refused by the core within {_SUSPICIOUS_S:.0f} s"
            )

    def check(self) -> None:
        """Checks the core's books; raises EngineDeadError if they are wrong."""
        self._worker.check()

    def close(self) -> None:
        """Frees the core; idempotent."""
        self._worker.close()
