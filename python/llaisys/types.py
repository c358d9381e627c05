"""Plain values that every room may know: parameters, requests' outputs, facts of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from llaisys.errors import RejectedError

RequestId: TypeAlias = str
SESSION_NAME_MAX = 64
SESSION_NAME_PATTERN = rf"^[A-Za-z0-9_][A-Za-z0-9._-]{{0,{SESSION_NAME_MAX - 1}}}$"
# Of which final hidden states of a prompt an embedding is the mean: all, or the last alone.
Pooling: TypeAlias = Literal["mean", "last"]

SEED_MAX = 2**63 - 1
LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_IDS_MAX = 256
BIASES_MAX = 1024
# More than the largest vocabularies.
ALLOWED_IDS_MAX = 1 << 19
BAD_WORDS_MAX = 128
TOKENS_MAX = 2**31 - 1
# The largest `max_num_seqs`; an engine refuses more choices than it can run at a time.
CHOICES_MAX = 256
GRAMMAR_BYTES_MAX = 64 << 10
GRAMMAR_DEPTH_MAX = 64


class FinishReason(str, Enum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's; `ABORT` exists in the Python API only."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


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
            raise RejectedError(f"{name} holds {value!r}, expected strings", param=name)
        if not 1 <= len(value) <= STOP_CHARS_MAX:
            raise RejectedError(
                f"{name} holds a string of {len(value)} characters, allowed are 1 to {STOP_CHARS_MAX}",
                param=name,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like; exactly one is set. Names are vLLM's. Hashable.

    - `json`: a JSON schema, an object or its text. `json_object`: any JSON object.
    - `regex`: a regular expression (Rust's `regex`, no look-around) that the whole answer matches.
    - `choice`: one of these texts. `grammar`: Lark, in the dialect of llguidance.

    Raises RejectedError naming the field: none or several, longer than 64 KiB, nested deeper than 64.
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
                f"structured_outputs sets {', '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(named)}",
                param="structured_outputs",
            )
        for name in ("json", "regex", "grammar"):
            if name in given:
                _check_grammar_text(f"structured_outputs.{name}", given[name])

    @property
    def field(self) -> str:
        """Which one is set."""
        named = ("json", "regex", "choice", "grammar")
        return next((name for name in named if getattr(self, name) is not None), "json_object")


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        where = "structured_outputs.json"
        raise RejectedError(f"{where} is no JSON schema: {e}", param=where) from e


def _choices(choices: Sequence[str]) -> tuple[str, ...]:
    where = "structured_outputs.choice"
    if isinstance(choices, str) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise RejectedError(f"{where} must be a list of texts that are not empty", param=where)
    for choice in choices:
        _check_unicode(where, choice)
    n_bytes = sum(len(choice.encode()) for choice in choices)
    if n_bytes > GRAMMAR_BYTES_MAX:
        raise RejectedError(f"{where} has {n_bytes} bytes, at most {GRAMMAR_BYTES_MAX}", param=where)
    return tuple(choices)


def _check_grammar_text(where: str, text: str) -> None:
    """Size and nesting, which the compiler's recursion follows."""
    if not isinstance(text, str) or not text:
        raise RejectedError(f"{where} must be a text that is not empty", param=where)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names, meanings and defaults are vLLM's.

    Raises RejectedError naming the field and its bound. `stop`, `stop_token_ids`, `logit_bias` and
    `bad_words` may be given as None, vLLM's default, which means none; afterwards they are never None.

    - `n`: answers to the same prompt, which is computed once; at most the engine's `max_num_seqs`.
    - `temperature` 0 is greedy (argmax, lowest id on a tie).
    - `top_k` 0 or -1: all; `top_p`, `min_p`, `typical_p`: probabilities in 0..1.
    - `repetition_penalty` looks at prompt and answer, `presence_penalty` and `frequency_penalty` at the
      answer.
    - `seed` None: drawn from the engine's seed and the request's ordinal. A draw depends on seed, choice and
      position only.
    - `logprobs` n: the sampled token's logprob and the n best, of the model's own distribution (before any
      of the above). `prompt_logprobs` n: the same of each prompt token but the first, which has no
      predecessor; such a prompt is computed whole, and not looked up in the prefix cache.
    - `max_tokens` None: until the context ends.
    - `logit_bias`: token id -> added to the logit, -100 to 100.
    - `structured_outputs`: the grammar that the answer keeps; not with `ignore_eos` or `min_tokens`, which
      would have it go on where the grammar has ended, nor `allowed_token_ids`, which may leave no token.
    - `allowed_token_ids`: only these can be sampled. `bad_words`: texts that are not sampled, with and
      without a space before; the last token of one is forbidden where the others have just been sampled.
      Where they, a grammar or `min_tokens` leave no token, the request ends with RejectedError.
    - `truncate_prompt_tokens` k: only the last k tokens of the prompt are used; -1: as many as leave room in
      the context for `max_tokens`.
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
    truncate_prompt_tokens: int | None = None

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
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
                if getattr(self, name):
                    raise RejectedError(f"{name} cannot be used with structured outputs", param=name)

    def with_grammar(self, grammar: StructuredOutputsParams) -> SamplingParams:
        """The same, and the answer keeps the grammar. Raises RejectedError where that cannot be."""
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
            _whole("logprobs", self.logprobs, 0, LOGPROBS_MAX)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_MAX)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, TOKENS_MAX)

    def _check_lists(self) -> None:
        """Counts first: a list that is too long costs no work for each of its items."""
        for name, items, most in (
            ("stop", self.stop, STOP_STRINGS_MAX),
            ("stop_token_ids", self.stop_token_ids, STOP_IDS_MAX),
            ("logit_bias", self.logit_bias, BIASES_MAX),
            ("allowed_token_ids", self.allowed_token_ids or (), ALLOWED_IDS_MAX),
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
        for token in self.allowed_token_ids or ():
            _whole("allowed_token_ids", token, 0, TOKENS_MAX)
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, TOKENS_MAX)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, TOKENS_MAX)
            _bounded(f"logit_bias[{token}]", bias, -100.0, 100.0)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate of one position: natural log of its probability, its rank (1 is the best), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request, so far or whole."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """True once `finish_reason` is set."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Tokens of a request, named as in OpenAI's `usage`: of the prompt, once, and of all choices.

    `cached_tokens`: prompt tokens whose KV came from the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class RequestOutput:
    """What a request has given, shaped as vLLM's.

    - `prompt_logprobs`, if asked for: one entry a prompt token, None for the first.
    - `embedding`, if that was asked for in place of an answer: `[d_model]` float32, little endian, length 1.
    - `queued_s`: seconds from arrival until it was first admitted, told with what comes first.
    """

    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    embedding: bytes | None = None
    queued_s: float = 0.0

    @property
    def usage(self) -> CompletionUsage:
        """Tokens of this output: of a streamed delta, the completion tokens are the delta's own."""
        n_prompt, n_new = len(self.prompt_token_ids), sum(len(each.token_ids) for each in self.outputs)
        return CompletionUsage(n_prompt, n_new, n_prompt + n_new, self.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session of the engine as it is now.

    - `num_tokens`: whose K and V were computed: its last request's prompt and answer, but for the last token.
    - `num_cached_tokens`: those that a request finds cached. `num_pinned_tokens`: those that are kept for it.
    - `is_restoring`: it is being read from a file; requests that name it wait.
    """

    name: str
    num_tokens: int
    num_cached_tokens: int
    num_pinned_tokens: int
    is_restoring: bool = False


# How JSON under a grammar is written (options of llguidance): on one line, as Python's `json.dumps` does it;
# whitespace without end would be a legal answer otherwise. A keyword of a schema that cannot be kept is an
# error and not passed over.
JSON_STYLE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class Content:
    """A part of an answer that is meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of an answer that thinks aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a function. `arguments`: a JSON object, as text."""

    name: str
    arguments: str


Part: TypeAlias = Content | Reasoning | ToolCall


class PartParser(Protocol):
    """Divides the text of one answer into its parts.

    The parts, with neighbours of one kind joined, are the same however the text was cut into pushes.
    """

    def push(self, text: str) -> list[Part]:
        """The parts that are certain once the answer goes on with this text."""

    def finish(self, *, cut: bool = False) -> list[Part]:
        """The rest: the answer is over. `cut`: by a limit of tokens, so the beginning of a tool call that
        never became whole is markup, not content, and left out."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer inside a GGUF file, as its metadata states it (`tokenizer.ggml.*`)."""

    model: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    add_bos: bool
    bos: int | None
    eos: int | None
    unk: int | None
    chat_template: str | None
    scores: list[float] | None = None
    add_space_prefix: bool | None = None


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU as the driver describes it. `capability` 90 is compute capability 9.0."""

    name: str
    capability: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CudaInfo:
    """What CUDA computes with on this machine; all but `reason` is empty if it cannot.

    Versions are CUDA's, as the driver knows it and of NVRTC ("13.0"). `libraries` are files, or bare names
    that the system's loader found.
    """

    reason: str | None
    driver_version: str | None = None
    nvrtc_version: str | None = None
    devices: tuple[CudaDevice, ...] = ()
    libraries: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether kernels can be compiled and run."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a checkpoint, read from its headers without loading the weights.

    `weight_bytes` are in the files, `packed_bytes` in memory, for each `dtype` setting ("auto", "float32",
    "bfloat16") and each `quantization` ("int8", "int4"; of float checkpoints); `screen_bytes`, likewise, are
    the 8-bit copy of the lm_head that `screen_lm_head` keeps. `kv_bytes_per_cell` maps a KV dtype
    ("float32", "float16", "bfloat16", "int8") to the bytes of one cell over all layers, K and V.
    `generation` holds what `generation_config.json` sets (`temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty`), nothing where it is silent. `tokenizer` is set for a GGUF; a folder has its
    `tokenizer.json` beside the weights.
    `pooling_type`: what a GGUF says of embeddings, as llama.cpp's number.
    """

    path: str
    file_format: str
    architecture: str
    dtype: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    max_position_embeddings: int
    n_parameters: int
    weight_bytes: int
    packed_bytes: dict[str, int]
    screen_bytes: dict[str, int]
    kv_bytes_per_cell: dict[str, int]
    bos_token_id: int | None
    eos_token_ids: list[int]
    generation: dict[str, Any]
    tokenizer: GgufTokenizer | None
    pooling_type: int | None = None
