"""Grammars that answers keep: compiled at the door, followed token by token in the engine, by llguidance.

Data path: spec (plain) -> `Grammars.compile`, off the engine's thread -> a prototype in a cache -> `Guides`
copies it for each running choice and fills the masks of each step.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from llaisys.engine.request import EngineRequest, Request
from llaisys.engine.worker import Batch
from llaisys.errors import LlaisysError, RejectedError, RequestFailedError, UnsupportedError
from llaisys.types import JSON_STYLE, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Mask = NDArray[np.uint32]

# CPU time that one grammar may take to compile. It cannot be interrupted, so its fuel ends it soon after.
COMPILE_S_MAX = 0.5
# The copies of a prototype share its lexer, which makes states as answers meet them and keeps them: some tens
# of KiB for a small grammar, 12 MiB were seen for a rich one. What is kept grows until each is used a lot.
PROTOTYPES_MAX = 64
# llguidance follows rules and `$ref`s by recursion. 64 KiB of text can make it go thousands of levels deep,
# which took up to 100 MiB of stack, and the end of the stack is the end of the process. Address space only.
_STACK_BYTES = 512 << 20
_STACK_SIZE = threading.Lock()  # the size for new threads is the process's

_LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000, max_grammar_size=200_000, max_lexer_states=50_000, verbose_errors=False
)
_JSON_STYLE = cast("JsonCompileOptions", JSON_STYLE)


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """What grammars need to know of a model, plain: its tokenizer as the JSON of `tokenizer.json`, the ids
    that end an answer, and how many logits a row has."""

    tokenizer: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int


class Grammars:
    """The compiled grammars of one model. Usable from any thread.

    The tokenizer's table (some hundred milliseconds) is built at the first use.
    """

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prototypes: OrderedDict[StructuredOutputsParams, LLMatcher] = OrderedDict()

    def compile(self, spec: StructuredOutputsParams) -> None:
        """Checks a grammar and keeps it for the requests that follow.

        Raises RejectedError naming the field of `structured_outputs` (it is no grammar, asks for what cannot
        be kept, or takes more than 0.5 s), UnsupportedError for a model without an end-of-text token.
        """
        self._prototype(spec)

    def matcher(self, spec: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the start of an answer. Raises as `compile`."""
        return self._prototype(spec).deep_copy()

    def forget(self, spec: StructuredOutputsParams) -> None:
        """The next matcher comes of a grammar that is compiled anew; matchers that exist stay as they are."""
        with self._lock:
            self._prototypes.pop(spec, None)

    def _prototype(self, spec: StructuredOutputsParams) -> LLMatcher:
        with self._lock:
            found = self._prototypes.get(spec)
            if found is not None:
                self._prototypes.move_to_end(spec)
                return found
            tokenizer = self._table()
        made = _on_deep_stack(lambda: _compiled(tokenizer, spec))
        with self._lock:
            self._prototypes[spec] = made
            if len(self._prototypes) > PROTOTYPES_MAX:
                self._prototypes.popitem(last=False)
        return made

    def _table(self) -> LLTokenizer:
        """The tokenizer's; the lock is held."""
        if self._tokenizer is None:
            tokens = self.tokens
            if not tokens.eos_token_ids:
                raise UnsupportedError(
                    "this model has no end-of-text token, which structured outputs need",
                    param="structured_outputs",
                )
            try:
                self._tokenizer = LLTokenizer(
                    tokens.tokenizer, n_vocab=tokens.vocab_size, eos_token=list(tokens.eos_token_ids)
                )
            except Exception as e:  # llguidance names no classes
                raise UnsupportedError(
                    f"structured outputs do not work with this model's tokenizer: {e}",
                    param="structured_outputs",
                ) from e
        return self._tokenizer


class Guides:
    """A matcher for each running choice with a grammar; the engine thread owns it.

    `ordinals`: open choices with a grammar; while it is empty, a step costs nothing more. Invariant: a
    matcher has read as many of the answer's tokens as it says; one that is gone (preemption) is made again
    and reads them all.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._matchers: dict[int, tuple[LLMatcher, int]] = {}
        self.ordinals: set[int] = set()

    def check(self, source: EngineRequest) -> None:
        """Raises UnsupportedError for a grammar in an engine that has no tokenizer."""
        if source.params.structured_outputs is not None and self._grammars is None:
            raise UnsupportedError("this engine has no tokenizer for grammars", param="structured_outputs")

    def fill(self, batch: Batch) -> list[tuple[Request, RequestFailedError]]:
        """Gives the batch its masks; whose grammar cannot be followed is taken out of it, and returned."""
        failed: list[tuple[Request, RequestFailedError]] = []
        if self._grammars is None or not self.ordinals:
            return failed
        for request in [each for each in batch.sampling() if each.ordinal in self.ordinals]:
            try:
                batch.masks[request.ordinal] = self._mask(self._grammars, request)
            except RequestFailedError as error:
                failed.append((request, error))
        if failed:
            lost = [request for request, _ in failed]
            batch.decode = [each for each in batch.decode if each not in lost]
            batch.chunks = [each for each in batch.chunks if each.request not in lost]
        return failed

    def _mask(self, grammars: Grammars, request: Request) -> Mask:
        """`[ceil(vocab / 32)]`: the tokens that may follow; eos among them where the answer may end.

        Raises RequestFailedError: the grammar cannot be followed any further, not by a lexer of its own
        either. The one that all copies share may be full of the states that other answers met.
        """
        try:
            return self._mask_of_copy(grammars, request)
        except RequestFailedError:
            spec = request.source.params.structured_outputs
            assert spec is not None
            self._matchers.pop(request.ordinal, None)
            grammars.forget(spec)
            return self._mask_of_copy(grammars, request)

    def _mask_of_copy(self, grammars: Grammars, request: Request) -> Mask:
        bits = np.zeros(-(-grammars.tokens.vocab_size // 32), np.uint32)
        matcher = self._at_end(grammars, request)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        _check(matcher)
        return bits

    def begin(self, choices: Sequence[Request]) -> None:
        """New choices of one request."""
        if choices[0].source.params.structured_outputs is not None:
            self.ordinals |= {choice.ordinal for choice in choices}

    def rest(self, request: Request) -> None:
        """The choice runs no more, or not now."""
        self._matchers.pop(request.ordinal, None)

    def end(self, request: Request) -> None:
        """The choice is over."""
        self.ordinals.discard(request.ordinal)

    def _at_end(self, grammars: Grammars, request: Request) -> LLMatcher:
        """The request's matcher, which has read the whole answer so far."""
        held = self._matchers.get(request.ordinal)
        if held is None:
            spec = request.source.params.structured_outputs
            assert spec is not None
            try:
                held = (grammars.matcher(spec), 0)
            except LlaisysError as e:
                raise RequestFailedError(f"the request's grammar does not compile in the engine: {e}") from e
        matcher, n_read = held
        answer: Sequence[int] = request.token_ids[request.num_prompt + n_read :]
        if answer:
            matcher.consume_tokens(list(answer))
            _check(matcher)
        self._matchers[request.ordinal] = (matcher, n_read + len(answer))
        return matcher


def _check(matcher: LLMatcher) -> None:
    """Raises RequestFailedError for a matcher in error, whose masks mean nothing."""
    if matcher.is_error():
        raise RequestFailedError(f"the request's grammar cannot be followed: {_first_line(matcher)}")


def _on_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    """The work's result, from a thread of its own; what it raises is raised here."""
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- the caller gets it, whatever it is
            result.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="llaisys-grammar").start()
        finally:
            threading.stack_size(before)
    return result.result()


def _compiled(tokenizer: LLTokenizer, spec: StructuredOutputsParams) -> LLMatcher:
    where = f"structured_outputs.{spec.field}"
    begin_s = time.thread_time()
    try:
        matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=_LIMITS)
    except ValueError as e:
        raise RejectedError(f"{where} is no grammar: {e}", param=where) from e
    if matcher.is_error():
        raise RejectedError(f"{where} cannot be kept: {_first_line(matcher)}", param=where)
    took_s = time.thread_time() - begin_s
    if took_s > COMPILE_S_MAX:
        raise RejectedError(
            f"{where} takes {took_s:.1f} s to compile, at most {COMPILE_S_MAX} s are allowed", param=where
        )
    return matcher


def _source(spec: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, spec.choice)))
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(spec.grammar)
    try:
        schema = {"type": "object"} if spec.json is None else json.loads(str(spec.json))
    except RecursionError as e:
        raise ValueError("nested too deep") from e
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)


def _literal(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _first_line(matcher: LLMatcher) -> str:
    """What llguidance says is wrong; the lines after the first show its inside."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    said = lines[0] if lines else "unknown reason"
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    return f"{said} {reason}".strip()[:300]
