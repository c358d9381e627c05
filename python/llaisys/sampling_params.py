"""SamplingParams and StructuredOutputsParams: how one request is sampled and constrained, with the bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from llaisys.errors import RejectedError, UnsupportedError

SEED_MAX = 2**63 - 1
# `logprobs` and `prompt_logprobs`: every token of the vocabulary.
ALL_LOGPROBS = -1
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_IDS_MAX = 256
BIASES_MAX = 1024
# More than the largest vocabularies.
ALLOWED_IDS_MAX = 1 << 19
BAD_WORDS_MAX = 128
TOKENS_MAX = 2**31 - 1
# The largest `max_num_seqs`; an engine rejects more choices than it can run at a time.
CHOICES_MAX = 256
GRAMMAR_BYTES_MAX = 64 << 10
GRAMMAR_DEPTH_MAX = 64
# How JSON under a grammar is formatted (options of llguidance): on one line, as `json.dumps` writes it,
# because free whitespace would allow an endless completion. An unsupported keyword of a schema is an error.
JSON_STYLE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}


class RequestOutputKind(Enum):
    """What each output of `AsyncLLM.generate` has; names and values are vLLM's.

    - `CUMULATIVE`: everything so far. `DELTA`: what is new since the previous output.
    - `FINAL_ONLY`: the whole completion, in a single output.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The constraint of a structured output. Exactly one field is set; names are vLLM's. Hashable.

    - `json`: a JSON schema, as an object or as text. `json_object`: any JSON object.
    - `regex`: a regular expression (Rust's `regex`, no look-around) that the whole completion matches.
    - `choice`: a list of texts, one of which is the completion. `grammar`: Lark, in llguidance's dialect.

    Raises RejectedError naming the field: none or several are set, one is longer than 64 KiB or nested deeper
    than 64.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        named = {name: getattr(self, name) for name in ("json", "regex", "choice", "grammar", "json_object")}
        given = {name: value for name, value in named.items() if value is not None}
        if len(given) != 1:
            raise RejectedError(
                f"structured_outputs sets {', '.join(given) or 'nothing'}; set exactly one of "
                f"{', '.join(named)}",
                param="structured_outputs",
            )
        for name in ("json", "regex", "grammar"):
            if name in given:
                _check_grammar_text(f"structured_outputs.{name}", given[name])

    @property
    def field(self) -> str:
        """The name of the field that is set."""
        named = ("json", "regex", "choice", "grammar")
        return next((name for name in named if getattr(self, name) is not None), "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Names, meanings and defaults are vLLM's.

    Raises RejectedError naming the field and its bound. `stop`, `stop_token_ids`, `logit_bias` and
    `bad_words` accept None, vLLM's default, as empty.

    - `n`: number of completions, up to the engine's `max_num_seqs`. The prompt is computed once.
    - `temperature`: 0 is greedy (argmax, lowest id on a tie).
    - `top_k`: 0 or -1 disables it. `top_p`, `min_p`, `typical_p`: probabilities, 0 to 1.
    - `repetition_penalty` counts prompt and completion; `presence_penalty` and `frequency_penalty` count the
      completion.
    - `seed`: None derives it from the engine's seed and the request's ordinal. A sample depends on seed,
      choice and position only.
    - `logprobs`: n adds the logprob of the sampled token and of the n best tokens, from the model's
      distribution before any of the above. `prompt_logprobs`: the same for each prompt token except the
      first, which has no predecessor. Such a prompt is computed as a whole, without the prefix cache. Both
      are limited by the engine's `max_logprobs`; -1 is the whole vocabulary.
    - `logprob_token_ids`: return the logprobs of these ids instead of the best ones, with the sampled
      token's. `logprobs` may be left out, or is their number. `max_logprobs` limits them. Only the sampled
      token has a `rank`.
    - `max_tokens`: None samples until the context is full.
    - `logit_bias`: token id -> value added to the logit, -100 to 100.
    - `structured_outputs`: the constraint of the completion. Not with `ignore_eos` or `min_tokens`, which
      continue after the end of the grammar, nor with `allowed_token_ids`, which may leave no token.
    - `allowed_token_ids`: only these are sampled.
    - `bad_words`: texts that are never sampled, with and without a leading space. The last token of a word is
      masked where its other tokens were just sampled.
    - If `allowed_token_ids`, `bad_words`, `min_tokens` or a grammar leave no token, the request ends with
      RejectedError.
    - `prediction`: text that the completion probably repeats (OpenAI's `prediction`). It is verified several
      tokens at a time and changes no token. Needs an engine with speculative decoding.
    - `detokenize`: False makes no text: `text` is empty, `decoded_token` is None, and `stop` cannot be used.
    - `output_kind`: what each output of `AsyncLLM.generate` has. `LLM` ignores it.
    - `extra_args`: arguments of custom samplers in vLLM. Here there are none, so any is an UnsupportedError.
    - `truncate_prompt_tokens`: number of tokens to use of the prompt. -1 uses as many as leave space in the
      context for `max_tokens`.
    - `truncation_side`: where `truncate_prompt_tokens` leaves tokens out, "left" (the beginning) or "right".
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    prediction: str | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, empty in (("stop", ()), ("stop_token_ids", ()), ("bad_words", ()), ("logit_bias", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self._check_lengths()
        self._check_numbers()
        self._check_lists()
        self._check_logprob_token_ids()
        self._check_output()
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
                if getattr(self, name):
                    raise RejectedError(f"{name} cannot be used with structured outputs", param=name)

    def with_grammar(self, grammar: StructuredOutputsParams) -> SamplingParams:
        """Return a copy with this constraint. Raises RejectedError if other fields exclude it."""
        return replace(self, structured_outputs=grammar)

    def _check_lengths(self) -> None:
        _whole("n", self.n, 1, CHOICES_MAX)
        _whole("min_tokens", self.min_tokens, 0, TOKENS_MAX)
        if self.max_tokens is None:
            return
        _whole("max_tokens", self.max_tokens, 1, TOKENS_MAX)
        if self.min_tokens > self.max_tokens:
            raise RejectedError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
            )

    def _check_numbers(self) -> None:
        _bounded("temperature", self.temperature, 0.0, 2.0)
        _bounded("top_p", self.top_p, 1e-9, 1.0)
        _whole("top_k", self.top_k, 0, TOKENS_MAX)
        _bounded("min_p", self.min_p, 0.0, 1.0)
        _bounded("typical_p", self.typical_p, 1e-9, 1.0)
        _bounded("repetition_penalty", self.repetition_penalty, 1e-3, 10.0)
        _bounded("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -SEED_MAX - 1, SEED_MAX)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, ALL_LOGPROBS, TOKENS_MAX)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, ALL_LOGPROBS, TOKENS_MAX)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, TOKENS_MAX)
        if self.truncation_side not in ("left", "right"):
            raise RejectedError(
                f"truncation_side is {str(self.truncation_side)[:40]!r}, allowed are left and right",
                param="truncation_side",
            )

    def _check_output(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RejectedError(
                f"output_kind is {self.output_kind!r}, expected a RequestOutputKind", param="output_kind"
            )
        if self.stop and not self.detokenize:
            raise RejectedError(
                "stop needs the text of the completion: leave out stop, or set detokenize", param="stop"
            )
        for name in self.extra_args or ():
            raise UnsupportedError(
                f"extra_args has {name!r}: no extra argument is supported", param="extra_args"
            )

    def _check_logprob_token_ids(self) -> None:
        """Set `logprobs` to the number of the ids. Raises RejectedError if it is another number."""
        n = len(self.logprob_token_ids or ())
        if n and self.logprobs not in (None, n):
            raise RejectedError(
                f"logprobs is {self.logprobs}, but logprob_token_ids has {n} ids: leave out logprobs",
                param="logprob_token_ids",
            )
        if n:
            object.__setattr__(self, "logprobs", n)

    def _check_lists(self) -> None:
        """Check lengths first, so that a list that is too long costs no work per item."""
        for name, items, most in (
            ("stop", self.stop, STOP_STRINGS_MAX),
            ("stop_token_ids", self.stop_token_ids, STOP_IDS_MAX),
            ("logit_bias", self.logit_bias, BIASES_MAX),
            ("allowed_token_ids", self.allowed_token_ids or (), ALLOWED_IDS_MAX),
            ("logprob_token_ids", self.logprob_token_ids or (), ALLOWED_IDS_MAX),
            ("bad_words", self.bad_words, BAD_WORDS_MAX),
        ):
            if len(items) > most:
                raise RejectedError(f"{name} has {len(items)} entries, at most {most}", param=name)
        _strings("stop", self.stop)
        _strings("bad_words", self.bad_words)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RejectedError(
                "allowed_token_ids is empty: no token could be sampled", param="allowed_token_ids"
            )
        for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                _whole(name, token, 0, TOKENS_MAX)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, TOKENS_MAX)
            _bounded(f"logit_bias[{token}]", bias, -100.0, 100.0)


def count_logprobs(param: str, value: int, max_logprobs: int, vocab_size: int) -> int:
    """Return how many logprobs `value` asks for: at most `vocab_size`, and all of them for ALL_LOGPROBS.

    Raises RejectedError naming `param` for more than `max_logprobs` (-1: no limit).
    """
    _whole(param, value, ALL_LOGPROBS, TOKENS_MAX)
    n_wanted = vocab_size if value == ALL_LOGPROBS else value
    if max_logprobs != ALL_LOGPROBS and n_wanted > max_logprobs:
        whole = f", the whole vocabulary of {vocab_size} tokens" if value == ALL_LOGPROBS else ""
        raise RejectedError(
            f"{param} is {value}{whole}, allowed are up to {max_logprobs} (max_logprobs)", param=param
        )
    return min(n_wanted, vocab_size)


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        where = "structured_outputs.json"
        raise RejectedError(f"{where} is not a JSON schema: {e}", param=where) from e


def _choices(choices: Sequence[str]) -> tuple[str, ...]:
    where = "structured_outputs.choice"
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RejectedError(f"{where} must be a list of non-empty texts", param=where)
    for choice in choices:
        _check_unicode(where, choice)
    n_bytes = sum(len(choice.encode()) for choice in choices)
    if n_bytes > GRAMMAR_BYTES_MAX:
        raise RejectedError(f"{where} has {n_bytes} bytes, at most {GRAMMAR_BYTES_MAX}", param=where)
    return tuple(choices)


def _check_grammar_text(where: str, text: str) -> None:
    """Check the size, and the nesting, which bounds the recursion of the grammar compiler."""
    if not isinstance(text, str) or not text:
        raise RejectedError(f"{where} must be a non-empty text", param=where)
    _check_unicode(where, text)
    n_bytes = len(text.encode())
    if n_bytes > GRAMMAR_BYTES_MAX:
        raise RejectedError(f"{where} has {n_bytes} bytes, at most {GRAMMAR_BYTES_MAX}", param=where)
    depth = 0
    for bracket in re.findall(r"[\[\](){}]", text):
        depth += 1 if bracket in "[({" else -1
        if depth > GRAMMAR_DEPTH_MAX:
            raise RejectedError(f"{where} is nested deeper than {GRAMMAR_DEPTH_MAX}", param=where)


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise RejectedError(f"{where} is not valid Unicode at character {e.start}", param=where) from e


def _bounded(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RejectedError(f"{name} is {value!r}, expected a number from {low} to {high}", param=name)
    if not low <= value <= high:
        raise RejectedError(f"{name} is {value}, allowed are {low} to {high}", param=name)


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RejectedError(f"{name} is {value!r}, expected a whole number from {low} to {high}", param=name)
    _bounded(name, value, low, high)


def _strings(name: str, values: Sequence[str]) -> None:
    for value in values:
        if not isinstance(value, str):
            raise RejectedError(f"{name} contains {value!r}, expected strings", param=name)
        if not 1 <= len(value) <= STOP_CHARS_MAX:
            raise RejectedError(
                f"{name} contains a string of {len(value)} characters, allowed are 1 to {STOP_CHARS_MAX}",
                param=name,
            )
