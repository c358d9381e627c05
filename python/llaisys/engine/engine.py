"""LLMEngine: submit, step, cancel. Owns every open request; settles what a step gave. One thread."""

from __future__ import annotations

from bisect import insort

from llaisys.engine.executor import Executor
from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.outputs import EngineOutput
from llaisys.engine.request import (
    Admitted,
    BrokenInvariant,
    Cancelled,
    EngineRequest,
    Event,
    Expired,
    Failed,
    Finished,
    Request,
    Running,
    advance,
    derive_seed,
)
from llaisys.engine.scheduler import PlannedChunk, View, admissible, plan, queue_key
from llaisys.engine.worker import Chunk, ChunkResult
from llaisys.errors import EngineDeadError, LlaisysError, QueueFullError, RejectedError
from llaisys.stats import EngineStats
from llaisys.types import RequestId


class LLMEngine:
    """Invariants: an open request is in exactly one of `_waiting` and `_running`; only running ones hold a
    sequence id; each submitted request gets exactly one output with a finish reason."""

    def __init__(self, executor: Executor, limits: Limits, seed: int) -> None:
        self._executor = executor
        self._limits = limits
        self._seed = seed
        self._requests: dict[RequestId, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._pending: list[EngineOutput] = []
        self._num_submitted = 0
        self._num_steps = 0

    @property
    def limits(self) -> Limits:
        """The bounds it keeps."""
        return self._limits

    def submit(self, source: EngineRequest) -> None:
        """Takes a request into the queue.

        Raises RejectedError, ContextLengthError (could never run) or QueueFullError; then it is not taken.
        """
        limit = token_limit(source.prompt_token_ids, source.params, self._limits)
        if source.request_id in self._requests:
            raise RejectedError(f"request id {source.request_id!r} is in use", param="request_id")
        seed = source.params.seed
        request = Request(
            source,
            ordinal=self._num_submitted,
            seed=derive_seed(self._seed, self._num_submitted) if seed is None else seed % 2**64,
            token_limit=limit,
        )
        queue = [*self._waiting]
        insort(queue, request, key=queue_key)
        n_left = len(queue) - len(admissible(self._view(queue)))
        if n_left > self._limits.max_num_queued_reqs:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already, at most {self._limits.max_num_queued_reqs} may"
            )
        self._waiting = queue
        self._requests[source.request_id] = request
        self._num_submitted += 1

    def cancel(self, request_id: RequestId) -> None:
        """Ends a request now; its ABORT output comes with the next step. An unknown (ended) id is ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._pending.append(self._finish(request, Cancelled()))

    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._requests or self._pending)

    def step(self, now_s: float) -> list[EngineOutput]:
        """Plans, runs one batch, settles. Outputs are in the order in which things happened.

        Raises EngineDeadError or BrokenInvariant: the engine is over; its open requests have had no end yet.
        """
        outputs, self._pending = self._pending, []
        made = plan(self._view(self._waiting), now_s)
        for request_id in made.expire:
            request = self._requests[request_id]
            outputs.append(self._finish(request, Expired(now_s - request.source.arrival_s)))
        for request_id in made.admit:
            outputs += self._admit(self._requests[request_id])
        chunks = [chunk for chunk in made.chunks if chunk.request_id in self._requests]
        if chunks:
            results = self._executor.run([self._rows(chunk) for chunk in chunks])
            for chunk, result in zip(chunks, results, strict=True):
                outputs += self._settle(chunk, result)
        elif self._requests and not outputs:
            raise BrokenInvariant(f"{len(self._waiting)} requests wait, none runs and none can be admitted")
        self._num_steps += 1
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and totals after the newest step."""
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_submitted=self._num_submitted,
            num_steps=self._num_steps,
            kv_cells=self._limits.n_cells,
            kv_cells_used=self._executor.worker.n_cells_used,
        )

    def check(self) -> None:
        """Checks the books, the core's included: every held sequence is a running request's."""
        ids = sorted(r.request_id for r in (*self._waiting, *self._running))
        held = [isinstance(r.state, Running) for r in (*self._waiting, *self._running)]
        owed = [False] * len(self._waiting) + [True] * len(self._running)
        if ids != sorted(self._requests) or held != owed:
            raise BrokenInvariant("a request is in no list, in two, or in the wrong one")
        if sum(r.token_limit for r in self._running) > self._limits.n_cells:
            raise BrokenInvariant("the running requests may need more cells than there are")
        owned, used = sum(r.num_computed for r in self._running), self._executor.worker.n_cells_used
        if owned != used:
            raise BrokenInvariant(f"{used} cells are held, the requests own {owned}")
        self._executor.check()

    def close(self) -> None:
        """Frees the core. Open requests are the caller's to end."""
        self._executor.close()

    # --- inside ---

    def _view(self, waiting: list[Request]) -> View:
        return View(waiting, self._running, self._limits)

    def _rows(self, chunk: PlannedChunk) -> Chunk:
        request = self._requests[chunk.request_id]
        if not isinstance(request.state, Running):
            raise BrokenInvariant(f"rows were planned for a request that is {request.state!r}")
        tokens = request.token_ids[chunk.start : chunk.start + chunk.n_tokens]
        return Chunk(request.state.seq_id, chunk.start, tokens, chunk.samples)

    def _admit(self, request: Request) -> list[EngineOutput]:
        """Leases a sequence; a request that the core will not have ends here, alone."""
        try:
            seq_id = self._executor.open_sequence(request)
        except EngineDeadError:
            raise
        except LlaisysError as error:
            return [self._finish(request, Failed(error))]
        request.state = advance(request.state, Admitted(seq_id))
        self._waiting.remove(request)
        insort(self._running, request, key=queue_key)
        return []

    def _settle(self, chunk: PlannedChunk, result: ChunkResult) -> list[EngineOutput]:
        """What one chunk gave becomes the request's; no output if it only caught up."""
        request = self._requests[chunk.request_id]
        if result.error is not None:
            return [self._finish(request, Failed(result.error))]
        request.num_computed += chunk.n_tokens
        if result.token_id is None:
            return []
        event = request.append(result.token_id)
        output = EngineOutput(
            request.request_id,
            [result.token_id],
            None if result.logprobs is None else [result.logprobs],
        )
        return [output if event is None else self._finish(request, event, output)]

    def _finish(self, request: Request, event: Event, last: EngineOutput | None = None) -> EngineOutput:
        """The one way out: returns the sequence and its cells, forgets the request, makes its only end."""
        before = request.state
        request.state = state = advance(before, event)
        if not isinstance(state, Finished):
            raise BrokenInvariant(f"{event!r} does not end a request")
        if isinstance(before, Running):
            self._executor.close_sequence(before.seq_id)
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        return EngineOutput(
            request.request_id,
            [] if last is None else last.new_token_ids,
            None if last is None else last.new_logprobs,
            state.reason,
            state.stop_reason,
            error=state.error,
        )
