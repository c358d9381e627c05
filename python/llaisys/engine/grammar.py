"""Compiles the grammars of structured outputs with llguidance, and limits the work of each.

`llaisys.grammar_trials` first runs `try_grammar` in a worker process that may be killed. Then the engine gets
the request, and `structured_output.py` compiles the grammar again on a thread, once for each choice.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llaisys.engine.batch import Mask
from llaisys.errors import RejectedError, RequestFailedError, UnsupportedError
from llaisys.sampling_params import JSON_STYLE, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")

# Limits count work, not time, so that a request always ends in the same way. The cost is quadratic in the
# number of parser items in a row: 3,000 take about 20 ms.
STEP_LEXER_FUEL, STEP_ITEMS_MAX, ROW_ITEMS_MAX = 50_000, 20_000, 3_000
_ITEMS_PER_PROPERTY = 4  # in a row, of an object's optional properties
LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000,
    max_grammar_size=200_000,
    max_lexer_states=50_000,
    step_lexer_fuel=STEP_LEXER_FUEL,
    step_max_items=STEP_ITEMS_MAX,
    max_items_in_row=ROW_ITEMS_MAX,
    verbose_errors=False,
)
# Part of a message of llguidance -> an explanation for the caller.
_REASONS = {
    "NoExtension": "no text can complete it",
    "too many expressions constructed": f"its regular expressions take more than {STEP_LEXER_FUEL} units of "
    "work for one token; make their repetitions smaller",
    "Current row has": f"it has more than {ROW_ITEMS_MAX} alternatives at one point, like an object with "
    f"more than {ROW_ITEMS_MAX // _ITEMS_PER_PROPERTY} optional properties",
    "Too many items": f"it takes more than {STEP_ITEMS_MAX} parser items for one token; use regular "
    "expressions in place of rules of single characters",
}
# Number of masks that a trial computes, and of tokens that it consumes.
TRIAL_TOKENS = 32
# Tokens that a trial prefers. They end strings and begin the next property, so that the trial covers the
# structure of a schema and not only its first string.
_STRUCTURE = ('", "', ', "', '{"', '"', ",")
_JSON_STYLE = cast("JsonCompileOptions", JSON_STYLE)


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """The tokenizer of a model as plain values, for compiling grammars.

    - `tokenizer_json`: the content of `tokenizer.json`.
    - `eos_token_ids`: the ids that end a completion. `vocab_size`: number of logits in a row.
    """

    tokenizer_json: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int


class GrammarCompiler:
    """Compiles grammars for one model. Thread-safe.

    The first use builds the token table, which takes a few hundred milliseconds.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def compile(self, spec: StructuredOutputsParams) -> LLMatcher:
        """Compile a grammar; return a matcher at the start of a completion.

        The matcher has its own lexer, so its cost and its failures depend only on this grammar and this
        completion. Call this on a deep stack (`FairThreadPool`), because llguidance follows rules and `$ref`s
        by recursion. Raises RejectedError naming the field of `structured_outputs` (an invalid or
        unsatisfiable grammar), or UnsupportedError for a model without an end-of-text token.
        """
        table, where = self.table(), f"structured_outputs.{spec.field}"
        try:
            matcher = LLMatcher(table, _source(spec), log_level=0, limits=LIMITS)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # a panic in llguidance is not an Exception
            raise RejectedError(f"{where} is not a valid grammar: {str(e)[:300]}", param=where) from e
        check(matcher, where)
        return matcher

    def table(self) -> LLTokenizer:
        """Return the model's token table. Raises UnsupportedError."""
        with self._lock:
            if self._table is None:
                self._table = self._new_table()
            return self._table

    def _new_table(self) -> LLTokenizer:
        tokenizer = self.tokenizer
        if not tokenizer.eos_token_ids:
            raise UnsupportedError(
                "this model has no end-of-text token, which structured outputs need",
                param="structured_outputs",
            )
        try:
            return LLTokenizer(
                tokenizer.tokenizer_json,
                n_vocab=tokenizer.vocab_size,
                eos_token=list(tokenizer.eos_token_ids),
            )
        except Exception as e:  # llguidance documents no exception classes
            raise UnsupportedError(
                f"structured outputs do not work with this model's tokenizer: {e}",
                param="structured_outputs",
            ) from e


def next_mask(matcher: LLMatcher, vocab_size: int, where: str) -> Mask:
    """Return the mask of the next token. It allows eos if the completion may end.

    Raises RejectedError if no token is allowed, or the mask takes more work than LIMITS allow.
    """
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    check(matcher, where)
    return bits


def check(matcher: LLMatcher, where: str) -> None:
    """Raise RejectedError for a matcher in its error state, whose masks are meaningless.

    Raises RequestFailedError if the matcher consumed a token that it does not allow, which is a bug.
    """
    if matcher.is_error():
        if "doesn't satisfy the grammar" in matcher.get_error():
            raise RequestFailedError("the completion violates its grammar")
        raise RejectedError(f"{where} cannot be followed: {_reason(matcher)}", param=where)


def try_grammar(compiler: GrammarCompiler, spec: StructuredOutputsParams) -> None:
    """Compile a grammar and follow it for TRIAL_TOKENS tokens. The time is unbounded.

    Raises the errors of `GrammarCompiler.compile`, and RejectedError if the grammar cannot be followed.
    """
    where = f"structured_outputs.{spec.field}"
    matcher, table = compiler.compile(spec), compiler.table()
    structure = [ids[0] for ids in map(table.tokenize_str, _STRUCTURE) if len(ids) == 1]
    for _ in range(TRIAL_TOKENS):
        bits = next_mask(matcher, compiler.tokenizer.vocab_size, where)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, compiler.tokenizer.eos_token_ids)]
        if not len(allowed):
            return
        chosen = next((id for id in structure if id in allowed), int(allowed[len(allowed) // 2]))
        matcher.consume_token(chosen)
        check(matcher, where)


def _source(spec: StructuredOutputsParams) -> str:
    """Return the grammar in llguidance's format. Raises ValueError."""
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, spec.choice)))
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(spec.grammar)
    try:
        schema = {"type": "object"} if spec.json is None else json.loads(str(spec.json))
    except RecursionError as e:
        raise ValueError("the schema is nested too deeply") from e
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)


def _literal(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _reason(matcher: LLMatcher) -> str:
    """Return llguidance's error message, or our explanation where we have a better one."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    message = lines[0] if lines else "unknown reason"
    for theirs, ours in _REASONS.items():
        if theirs in message:
            return ours
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    return f"{message} {reason}".strip()[:300]


# Stack bytes of a thread. llguidance recurses into rules and `$ref`s: 64 KiB of text can nest thousands of
# levels, which used up to 100 MiB of stack. A stack overflow would end the process. This reserves address
# space only.
_STACK_BYTES = 512 << 20
_STACK_SIZE = threading.Lock()  # the stack size of new threads is a setting of the process


class FairThreadPool:
    """Threads with deep stacks that serve clients round robin, so none waits for all work of another.

    The first `submit` starts the `num_threads` threads. Thread-safe.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, client_id: str, work: Callable[[], T]) -> Future[T]:
        """Queue work after the earlier work of the client, and return its future."""
        future: Future[T] = Future()
        with self._changed:
            self._queues.setdefault(client_id, deque()).append((future, work))
            self._changed.notify()
            if not self._threads:
                self._threads = [_deep_thread(self._run, self._name) for _ in range(self._num_threads)]
        return future

    def close(self) -> None:
        """Cancel queued work and wait for work in progress. Idempotent."""
        with self._changed:
            self._closed = True
            for future, _ in chain.from_iterable(self._queues.values()):
                future.cancel()
            self._queues.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 -- passed on through the future
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work  # an idle thread must not keep them alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Return the oldest work of the least recently served client; None if the pool is closed."""
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            client_id, queue = self._queues.popitem(last=False)
            item = queue.popleft()
            if queue:
                self._queues[client_id] = queue  # behind the other clients
            return item


def _deep_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with a deep stack."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
