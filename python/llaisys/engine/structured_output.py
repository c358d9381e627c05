"""The masks of running choices with a grammar, for each step.

Data path: admission -> compile on a thread -> before each step: read the answer's new token, compute the
mask, on the engine thread where that is known to be cheap, else on a thread while the other rows go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from llguidance import LLMatcher

from llaisys.engine.fair_threads import FairThreads
from llaisys.engine.grammar import Grammars, Mask, check, next_mask
from llaisys.engine.request import EngineRequest, Request
from llaisys.engine.worker import Batch
from llaisys.errors import LlaisysError, RequestFailedError, UnsupportedError

# One, because it takes CPU time from the core's threads.
NUM_THREADS = 1
# A choice with a mask that took longer (CPU time) has all later ones computed on a thread.
SLOW_MASK_S = 0.001
# What the masks of one step may take on the engine thread; the rest goes to the threads.
STEP_MASKS_S = 0.005
# A step waits so long for masks that threads compute, and longer where no other row could run.
_WAIT_S, _WAIT_ALONE_S = 0.002, 0.05
# At run time an error cannot name the field that the request used.
_WHERE = "structured_outputs"


@dataclass(slots=True, eq=False)
class _Choice:
    """One choice's matcher. `next_mask`: work under way or done for the next token; while there is one, its
    thread owns the rest."""

    request: Request
    matcher: LLMatcher | None = None
    num_read: int = 0
    is_slow: bool = False
    next_mask: Future[Mask] | None = None


class StructuredOutputManager:
    """A matcher for each choice with a grammar that has been admitted; the engine thread owns it.

    A row whose mask is not ready is left out of the step and keeps its place: times decide which step
    computes a row, never what comes out. Invariant: each choice has one lexer of its own until its end, and
    computes one mask for each token, so its grammar fails at the same token whatever else runs, preempted or
    not.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._threads = FairThreads(NUM_THREADS, "llaisys-grammar")
        self._choices: dict[int, _Choice] = {}
        self.is_waiting = False  # the newest step left rows out

    def __len__(self) -> int:
        """Open choices with a grammar; while there are none, a step costs nothing more."""
        return len(self._choices)

    def check(self, source: EngineRequest) -> None:
        """Raises UnsupportedError for a grammar in an engine that has no tokenizer."""
        if source.params.structured_outputs is not None and self._grammars is None:
            raise UnsupportedError("this engine has no tokenizer for grammars", param="structured_outputs")

    def begin(self, choices: Sequence[Request]) -> None:
        """New choices of one request."""
        if choices[0].source.params.structured_outputs is not None:
            self._choices.update((choice.ordinal, _Choice(choice)) for choice in choices)

    def admit(self, request: Request) -> None:
        """Begins to compile the grammar of a choice that runs for the first time."""
        choice = self._choices.get(request.ordinal)
        if choice is not None and choice.matcher is None and choice.next_mask is None:
            self._submit(choice)

    def fill(self, batch: Batch) -> list[tuple[Request, LlaisysError]]:
        """Gives the batch its masks. Takes out of it the rows whose mask is not ready, and those whose
        grammar cannot be followed, which it returns."""
        self.is_waiting = False
        if not self._choices:
            return []
        choices = [c for r in batch.sampling() if (c := self._choices.get(r.ordinal)) is not None]
        begin_s = time.thread_time()
        for choice in choices:
            if choice.next_mask is not None:
                continue
            if choice.is_slow or choice.matcher is None or time.thread_time() - begin_s > STEP_MASKS_S:
                self._submit(choice)
            else:
                choice.next_mask = self._done(choice)
        self._wait(choices, len(batch))
        failed: list[tuple[Request, LlaisysError]] = []
        left_out: set[int] = set()
        for choice in choices:
            work, request = choice.next_mask, choice.request
            assert work is not None
            if not work.done():
                left_out.add(request.ordinal)
                self.is_waiting = True
                continue
            choice.next_mask = None
            try:
                batch.masks[request.ordinal] = work.result()
            except LlaisysError as error:
                failed.append((request, error))
                left_out.add(request.ordinal)
        if left_out:
            batch.decode = [each for each in batch.decode if each.ordinal not in left_out]
            batch.chunks = [each for each in batch.chunks if each.request.ordinal not in left_out]
        return failed

    def end(self, request: Request) -> None:
        """The choice is over."""
        choice = self._choices.pop(request.ordinal, None)
        if choice is not None and choice.next_mask is not None:
            choice.next_mask.cancel()

    def close(self) -> None:
        """Waits for the work that is under way, each piece of which a trial has bounded."""
        self._threads.close()

    # --- inside ---

    def _wait(self, choices: list[_Choice], num_items: int) -> None:
        """For masks that threads compute: briefly, so that other rows do not wait, or for one of them where
        there are no other rows."""
        works = [c.next_mask for c in choices if c.next_mask is not None and not c.next_mask.done()]
        if works and len(works) == num_items:
            wait(works, _WAIT_ALONE_S, FIRST_COMPLETED)
        elif works:
            wait(works, _WAIT_S)

    def _submit(self, choice: _Choice) -> None:
        client_id = choice.request.source.client_id
        choice.next_mask = self._threads.submit(client_id, lambda: self._next_mask(choice))

    def _done(self, choice: _Choice) -> Future[Mask]:
        done: Future[Mask] = Future()
        try:
            done.set_result(self._next_mask(choice))
        except LlaisysError as error:
            done.set_exception(error)
        return done

    def _next_mask(self, choice: _Choice) -> Mask:
        """Of the token behind the answer so far. Raises RejectedError: the grammar takes more than its
        limits, or cannot be followed any further."""
        request, grammars = choice.request, self._grammars
        spec = request.source.params.structured_outputs
        assert grammars is not None
        assert spec is not None
        try:
            if choice.matcher is None:
                choice.matcher = grammars.compile(spec)
            answer = request.token_ids[request.num_prompt + choice.num_read :]
            begin_s = time.thread_time()
            if answer:
                choice.matcher.consume_tokens(list(answer))
                check(choice.matcher, _WHERE)
                choice.num_read += len(answer)
            mask = next_mask(choice.matcher, grammars.tokens.vocab_size, _WHERE)
            choice.is_slow = choice.is_slow or time.thread_time() - begin_s > SLOW_MASK_S
            return mask
        except LlaisysError:
            raise
        except Exception as error:
            raise RequestFailedError(f"the request's grammar failed in the engine: {error}") from error
