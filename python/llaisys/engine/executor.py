"""Carries a step out on the worker, and finds the row that a failing step fails for."""

from __future__ import annotations

from collections.abc import Sequence

from llaisys.engine.request import Request
from llaisys.engine.worker import Chunk, ChunkResult, Worker
from llaisys.errors import EngineDeadError, LlaisysError, RequestFailedError

# Of so many chunks or more, half failing alone means that the engine is broken and not its requests.
_SUSPICIOUS_CHUNKS = 4


class Executor:
    """One worker now; ranks and models of several workers stand behind the same calls later."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def worker(self) -> Worker:
        """The worker, for its facts."""
        return self._worker

    def open_sequence(self, request: Request) -> int:
        """Leases a sequence for a request. Raises what the core refuses it with; nothing stays lent then."""
        return self._worker.open_sequence(request)

    def close_sequence(self, seq_id: int) -> None:
        """Returns a sequence with its cells."""
        self._worker.close_sequence(seq_id)

    def run(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Computes the chunks; a chunk that the core fails on gets its error, the others their tokens.

        A failing decode has changed nothing, and a row's result does not depend on its company, so running
        the halves again gives the innocent the tokens they would have had.

        Raises EngineDeadError: the core is lost, or refuses half of a batch row by row. A row that merely
        came out wrong (`non_finite`, `all_masked`) is its request's affair, however many there are.
        """
        results = self._try(chunks)
        n_failed = sum(result.refused for result in results)
        if len(chunks) >= _SUSPICIOUS_CHUNKS and 2 * n_failed >= len(chunks):
            raise EngineDeadError(
                f"{n_failed} of {len(chunks)} requests were refused by the core in one step"
            )
        return results

    def _isolate(self, chunks: Sequence[Chunk], error: LlaisysError) -> list[ChunkResult]:
        """Results of chunks that failed together with `error`: the culprit its own, the others tokens."""
        if len(chunks) == 1:
            alone = RequestFailedError(f"the core refused this request's rows: {error}")
            return [ChunkResult(error=alone, refused=True)]
        half = len(chunks) // 2
        return self._try(chunks[:half]) + self._try(chunks[half:])

    def _try(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        try:
            return self._worker.run(chunks)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            return self._isolate(chunks, error)

    def check(self) -> None:
        """Checks the core's books; raises EngineDeadError if they are wrong."""
        self._worker.check()

    def close(self) -> None:
        """Frees the core; idempotent."""
        self._worker.close()
