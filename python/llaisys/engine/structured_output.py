"""StructuredOutputManager: computes the token masks of running choices with a grammar, for each step.

Data path: admission -> compile on a thread -> before each step: consume the new token and compute the next
mask. Cheap masks are computed on the engine thread, others on a thread of the pool while the other rows run.

The masks of draft rows come from a second matcher, so that a choice's own matcher does the same work with and
without drafts, and fails at the same token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

from llguidance import LLMatcher

from llaisys.engine.batch import Batch, Mask
from llaisys.engine.grammar import FairThreadPool, GrammarCompiler, check, next_mask
from llaisys.engine.request import EngineRequest, Request
from llaisys.errors import LlaisysError, RequestFailedError, UnsupportedError

# One thread, because it competes with the core's threads for CPU time.
NUM_THREADS = 1
# If a mask takes more CPU seconds than this, all later masks of the choice are computed on the pool.
SLOW_MASK_S = 0.001
# CPU seconds for masks on the engine thread per step; the remaining masks are computed on the pool.
STEP_MASKS_S = 0.005
# Seconds that a step waits for masks from the pool, and seconds if no other row could run.
_WAIT_S, _WAIT_ALONE_S = 0.002, 0.05
# Field name in errors while a request runs: the engine does not know the field that the client used.
_WHERE = "structured_outputs"


@dataclass(slots=True, eq=False)
class _Choice:
    """The matcher of one choice.

    - `next_mask`: the mask of the next token, done or in progress. While it is in progress, its thread owns
      `matcher`, `num_read` and `is_slow`.
    - `num_read`: output tokens that `matcher` has consumed. `draft`: the matcher for draft rows.
    """

    request: Request
    matcher: LLMatcher | None = None
    num_read: int = 0
    is_slow: bool = False
    next_mask: Future[Mask] | None = None
    draft: _DraftMatcher | None = None


@dataclass(slots=True, eq=False)
class _DraftMatcher:
    """A second matcher of a choice, with its own lexer. `matcher`: compiled on the pool; None after a
    failure. `num_read`: output tokens that it has consumed."""

    matcher: Future[LLMatcher] | None
    num_read: int = 0

    def masks(self, request: Request, drafts: Sequence[int], vocab_size: int) -> list[Mask]:
        """Return the mask of the row after each draft.

        They end before a draft that the grammar does not allow or that exceeds a limit.
        """
        masks: list[Mask] = []
        if self.matcher is None or not self.matcher.done():
            return masks
        try:
            matcher = self.matcher.result()
            if new_token_ids := request.output_from(self.num_read):
                matcher.consume_tokens(list(new_token_ids))
                check(matcher, _WHERE)
                self.num_read = request.num_output
            for draft in drafts:
                if not matcher.validate_tokens([draft]):
                    break
                matcher.consume_tokens([draft])
                check(matcher, _WHERE)
                masks.append(next_mask(matcher, vocab_size, _WHERE))
            if masks and not matcher.rollback(len(masks)):
                self.matcher = None
        except Exception:  # noqa: BLE001 -- a failure of this matcher ends only the drafts
            self.matcher = None
        return masks


class StructuredOutputManager:
    """Owns the matcher of each admitted choice with a grammar. Engine thread only.

    A row whose mask is not ready skips the step and keeps its batch slot. So timing affects which step
    computes a row, but never its result. Invariant: each choice has its own lexer until it ends, and computes
    one mask per token. So its grammar fails at the same token regardless of other requests and preemptions.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._threads = FairThreadPool(NUM_THREADS, "llaisys-grammar")
        self._choices: dict[int, _Choice] = {}
        self.is_waiting = False  # True if the newest step skipped rows

    def __len__(self) -> int:
        """Number of open choices with a grammar; while it is 0, steps have no extra cost."""
        return len(self._choices)

    def check_supported(self, source: EngineRequest) -> None:
        """Raise UnsupportedError for a grammar if the engine has no tokenizer."""
        if source.params.structured_outputs is not None and self._compiler is None:
            raise UnsupportedError(
                "this engine has no tokenizer for structured outputs", param="structured_outputs"
            )

    def add(self, choices: Sequence[Request]) -> None:
        """Add the new choices of one request."""
        if choices[0].source.params.structured_outputs is not None:
            self._choices.update((choice.ordinal, _Choice(choice)) for choice in choices)

    def start_compiling(self, request: Request) -> None:
        """Start compiling the grammar of a choice that runs for the first time."""
        choice = self._choices.get(request.ordinal)
        if choice is not None and choice.matcher is None and choice.next_mask is None:
            self._submit(choice)

    def fill_masks(self, batch: Batch) -> list[tuple[Request, LlaisysError]]:
        """Set the masks of a batch, and remove the rows that cannot run.

        These are rows whose mask is not ready and rows whose grammar failed. Return the latter with their
        errors. Drafts after the last one with a mask are removed, too.
        """
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
        masks: dict[int, list[Mask]] = {}
        batch.masks = masks
        for choice in choices:
            work, request = choice.next_mask, choice.request
            assert work is not None
            if not work.done():
                left_out.add(request.ordinal)
                self.is_waiting = True
                continue
            choice.next_mask = None
            try:
                masks[request.ordinal] = [work.result()]
            except LlaisysError as error:
                failed.append((request, error))
                left_out.add(request.ordinal)
                continue
            if drafts := batch.drafts.pop(request.ordinal, None):
                if not choice.is_slow and time.thread_time() - begin_s < STEP_MASKS_S:
                    masks[request.ordinal] += self._draft_masks(choice, drafts)
                if n_drafts := len(masks[request.ordinal]) - 1:
                    batch.drafts[request.ordinal] = drafts[:n_drafts]
        if left_out:
            batch.decode = [each for each in batch.decode if each.ordinal not in left_out]
            batch.chunks = [each for each in batch.chunks if each.request.ordinal not in left_out]
            batch.drafts = {ordinal: d for ordinal, d in batch.drafts.items() if ordinal not in left_out}
        return failed

    def advance(self, request: Request, token_ids: Sequence[int]) -> tuple[int, LlaisysError | None]:
        """Consume the tokens that a choice got in one step, except the last, and compute the mask after each.

        Return the number of tokens that the choice would get one by one, and the error that ends it then.
        """
        choice = self._choices.get(request.ordinal)
        for n_kept, token_id in enumerate(token_ids[:-1] if choice is not None else (), start=1):
            assert choice is not None
            try:
                self._consume(choice, [token_id])
            except LlaisysError as error:
                return n_kept, error
        return len(token_ids), None

    def drop_matcher(self, request: Request) -> None:
        """Drop the matcher of a choice that has ended."""
        choice = self._choices.pop(request.ordinal, None)
        if choice is None:
            return
        if choice.next_mask is not None:
            choice.next_mask.cancel()
        if choice.draft is not None and choice.draft.matcher is not None:
            choice.draft.matcher.cancel()

    def close(self) -> None:
        """Wait for the work in progress, which the trials have bounded."""
        self._threads.close()

    # --- inside ---

    def _wait(self, choices: list[_Choice], num_items: int) -> None:
        """Wait for masks from the pool: briefly if other rows can run, otherwise for the first mask."""
        pending = [c.next_mask for c in choices if c.next_mask is not None and not c.next_mask.done()]
        if pending and len(pending) == num_items:
            wait(pending, _WAIT_ALONE_S, FIRST_COMPLETED)
        elif pending:
            wait(pending, _WAIT_S)

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
        """Compute the mask of the next token.

        Raises RejectedError if the grammar exceeds its limits or cannot be followed any further.
        """
        if choice.matcher is None:
            choice.matcher = self._compile(choice)
        return self._consume(choice, choice.request.output_from(choice.num_read))

    def _compile(self, choice: _Choice) -> LLMatcher:
        spec = choice.request.source.params.structured_outputs
        assert self._compiler is not None
        assert spec is not None
        with _named_errors():
            return self._compiler.compile(spec)

    def _consume(self, choice: _Choice, token_ids: Sequence[int]) -> Mask:
        """Consume tokens and return the mask after them. Raises as `_next_mask`."""
        assert self._compiler is not None
        assert choice.matcher is not None
        begin_s = time.thread_time()
        with _named_errors():
            if token_ids:
                choice.matcher.consume_tokens(list(token_ids))
                check(choice.matcher, _WHERE)
                choice.num_read += len(token_ids)
            mask = next_mask(choice.matcher, self._compiler.tokenizer.vocab_size, _WHERE)
        choice.is_slow = choice.is_slow or time.thread_time() - begin_s > SLOW_MASK_S
        return mask

    def _draft_masks(self, choice: _Choice, drafts: Sequence[int]) -> list[Mask]:
        """Return the masks of the rows after the first drafts. The first call compiles a matcher for them."""
        if choice.draft is None:
            client_id = choice.request.source.client_id
            choice.draft = _DraftMatcher(self._threads.submit(client_id, lambda: self._compile(choice)))
        assert self._compiler is not None
        vocab_size = self._compiler.tokenizer.vocab_size
        return choice.draft.masks(choice.request, drafts, vocab_size)


@contextmanager
def _named_errors() -> Iterator[None]:
    """Convert unexpected errors of llguidance to RequestFailedError."""
    try:
        yield
    except LlaisysError:
        raise
    except Exception as error:
        raise RequestFailedError(f"the request's grammar failed in the engine: {error}") from error
