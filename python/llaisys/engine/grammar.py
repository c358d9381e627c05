"""Grammars that answers keep, compiled by llguidance, and the bounds of the work that one may cost.

Data path: spec (plain) -> `try_grammar` in a process that may be killed (`llaisys.grammar_trials`) -> with
the request to the engine -> `Grammars.compile` on a thread of `structured_output.py`, for each choice.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from llaisys.errors import RejectedError, RequestFailedError, UnsupportedError
from llaisys.types import JSON_STYLE, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Mask = NDArray[np.uint32]

# Counted work, never time, so that a request always ends in the same way. The parser's items cost the square
# of their number in a row: 3,000 take about 20 ms.
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
# What llguidance says -> what helps a caller.
_REASONS = {
    "NoExtension": "no text can complete it",
    "too many expressions constructed": f"its regular expressions take more than {STEP_LEXER_FUEL} units of "
    "work for one token; make their repetitions smaller",
    "Current row has": f"it has more than {ROW_ITEMS_MAX} ways to go on at once, as an object with more than "
    f"{ROW_ITEMS_MAX // _ITEMS_PER_PROPERTY} optional properties has",
    "Too many items": f"it takes more than {STEP_ITEMS_MAX} parser items for one token; use regular "
    "expressions in place of rules of single characters",
}
# A trial computes so many masks, and reads so many tokens.
TRIAL_TOKENS = 32
# The tokens that a trial reads where it may: they end strings and begin the next property, and so lead
# through the structure of a schema instead of through the text of its first string.
_STRUCTURE = ('", "', ', "', '{"', '"', ",")
_JSON_STYLE = cast("JsonCompileOptions", JSON_STYLE)


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """What grammars need to know of a model, plain: its tokenizer as the JSON of `tokenizer.json`, the ids
    that end an answer, and how many logits a row has."""

    tokenizer: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int


class Grammars:
    """Compiles grammars for one model. Usable from any thread.

    The tokenizer's table (some hundred milliseconds) is built at the first use.
    """

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def compile(self, spec: StructuredOutputsParams) -> LLMatcher:
        """A matcher at the start of an answer, with a lexer of its own: what it may cost and where it fails
        depend on this grammar and this answer alone.

        llguidance follows rules and `$ref`s by recursion: call it on a deep stack (`FairThreads`). Raises
        RejectedError naming the field of `structured_outputs` (it is no grammar, or asks for what cannot be
        kept), UnsupportedError for a model without an end-of-text token.
        """
        table, where = self.table(), f"structured_outputs.{spec.field}"
        try:
            matcher = LLMatcher(table, _source(spec), log_level=0, limits=LIMITS)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # a panic of llguidance is no Exception
            raise RejectedError(f"{where} is no grammar: {str(e)[:300]}", param=where) from e
        check(matcher, where)
        return matcher

    def table(self) -> LLTokenizer:
        """The model's tokens, for llguidance. Raises UnsupportedError."""
        with self._lock:
            if self._table is None:
                self._table = self._new_table()
            return self._table

    def _new_table(self) -> LLTokenizer:
        tokens = self.tokens
        if not tokens.eos_token_ids:
            raise UnsupportedError(
                "this model has no end-of-text token, which structured outputs need",
                param="structured_outputs",
            )
        try:
            return LLTokenizer(
                tokens.tokenizer, n_vocab=tokens.vocab_size, eos_token=list(tokens.eos_token_ids)
            )
        except Exception as e:  # llguidance names no classes
            raise UnsupportedError(
                f"structured outputs do not work with this model's tokenizer: {e}",
                param="structured_outputs",
            ) from e


def next_mask(matcher: LLMatcher, vocab_size: int, where: str) -> Mask:
    """`[ceil(vocab / 32)]`: the tokens that may follow; eos among them where the answer may end.

    Raises RejectedError: no text can follow, or the mask takes more than LIMITS.
    """
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    check(matcher, where)
    return bits


def check(matcher: LLMatcher, where: str) -> None:
    """Raises RejectedError for a matcher in error, whose masks mean nothing, and RequestFailedError if it was
    given a token that it does not allow, which is a bug of the engine."""
    if matcher.is_error():
        if "doesn't satisfy the grammar" in matcher.get_error():
            raise RequestFailedError("the answer has left its grammar")
        raise RejectedError(f"{where} cannot be kept: {_reason(matcher)}", param=where)


def try_grammar(grammars: Grammars, spec: StructuredOutputsParams) -> None:
    """Compiles a grammar and follows it for TRIAL_TOKENS tokens. Raises as `Grammars.compile`, and
    RejectedError where a mask shows that it cannot be followed. Not bounded in time."""
    where = f"structured_outputs.{spec.field}"
    matcher, table = grammars.compile(spec), grammars.table()
    structure = [ids[0] for ids in map(table.tokenize_str, _STRUCTURE) if len(ids) == 1]
    for _ in range(TRIAL_TOKENS):
        bits = next_mask(matcher, grammars.tokens.vocab_size, where)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, grammars.tokens.eos_token_ids)]
        if not len(allowed):
            return
        chosen = next((id for id in structure if id in allowed), int(allowed[len(allowed) // 2]))
        matcher.consume_token(chosen)
        check(matcher, where)


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


def _reason(matcher: LLMatcher) -> str:
    """What llguidance says is wrong, in our words where its own say little."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    said = lines[0] if lines else "unknown reason"
    for theirs, ours in _REASONS.items():
        if theirs in said:
            return ours
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    return f"{said} {reason}".strip()[:300]
