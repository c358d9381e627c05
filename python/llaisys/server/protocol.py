"""What the fields of a request body mean. The fields we serve are typed in `bodies.py`.

A field is one of four: served (typed there), without effect (`NO_EFFECT`), known but not served
(`NEUTRAL`, accepted while null or neutral, else a 400 that names it), or unknown (accepted and named in the
header `x-llaisys-ignored-fields`; a 400 with `--strict-fields`). Null means absent everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.bodies import (
    CACHE_SALT_CHARS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
)
from llaisys.server.checks import text_of
from llaisys.server.errors import ApiError
from llaisys.server.keys import cache_salt
from llaisys.sessions import check_name
from llaisys.types import SamplingParams

IGNORED_NAMES_MAX = 64
# Choices of one prompt over HTTP.
N_MAX = 8
PRIORITY_MAX = 2**31 - 1

# Hints and bookkeeping of OpenAI's platform; an answer is the same with and without them.
NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options.include_obfuscation",
        # Special tokens never have spaces between them here, as in vLLM with a fast tokenizer.
        "spaces_between_special_tokens",
    }
)

# Known to OpenAI's or vLLM's API and not served: field -> values that ask for nothing (null always does).
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "truncation_side": ("left",),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
}

CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "best_of": (1,),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "suffix": ("",),
    "prompt_embeds": (),
}


EMBEDDING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "normalize": (True,),
    "use_activation": (True,),
    "truncation_side": ("left",),
    "session_id": ("",),
}


TOKENS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """When a stream states its usage: in a chunk before `[DONE]`, and in every chunk."""

    at_end: bool
    in_every_chunk: bool


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a request asks of the form of its answer.

    - `n`: choices of each prompt. `n_top`: best candidates a token if logprobs were asked for, else None.
    - `token_ids`: those of prompt and answer are given too. `ids_as_tokens`: logprobs name a token by its id.
    - `prompt_logprobs`: they are given beside the answer. `echo`: the prompt begins it. `stream`: it is one.
    """

    usage: UsageOptions
    n: int = 1
    n_top: int | None = None
    token_ids: bool = False
    ids_as_tokens: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    stream: bool = False


def answer_options(request: GenerationRequest, params: SamplingParams) -> AnswerOptions:
    """Raises RejectedError for options that need, or exclude, a stream."""
    if request.stream and request.prompt_logprobs is not None:
        raise RejectedError("prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs")
    return AnswerOptions(
        usage=usage_options(request),
        n=params.n,
        n_top=params.logprobs,
        token_ids=bool(request.return_token_ids),
        ids_as_tokens=bool(request.return_tokens_as_token_ids),
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=bool(request.echo),
        stream=bool(request.stream),
    )


def engine_options(
    request: GenerationRequest | EmbeddingRequest,
    client_id: str,
    sharing: Literal["per-key", "all"] = "per-key",
) -> dict[str, Any]:
    """What the engine is told of a request besides prompt and sampling. `sharing`: of cached prefixes. Raises
    RejectedError.

    Where there are keys (`client_id` is not empty) nobody goes before the others' requests: a priority can
    only be lowered, by a number above 0.
    """
    priority, salt = request.priority or 0, request.cache_salt or ""
    first = 0 if client_id else -PRIORITY_MAX
    if not first <= priority <= PRIORITY_MAX:
        raise RejectedError(
            f"priority is {priority}, allowed are {first} (first) to {PRIORITY_MAX}", param="priority"
        )
    if len(salt) > CACHE_SALT_CHARS_MAX:
        raise RejectedError(
            f"cache_salt has {len(salt)} characters, at most {CACHE_SALT_CHARS_MAX}", param="cache_salt"
        )
    session_id = request.session_id or "" if isinstance(request, GenerationRequest) else ""
    if session_id:
        check_name(session_id)
    return {
        "client_id": client_id,
        "priority": priority,
        "cache_salt": cache_salt(client_id, text_of("cache_salt", salt), sharing),
        "session_id": session_id,
    }


def usage_options(request: GenerationRequest) -> UsageOptions:
    """Raises RejectedError for stream_options without stream."""
    options = request.stream_options
    if options is None:
        return UsageOptions(False, False)
    if not request.stream:
        raise RejectedError("stream_options needs stream=true", param="stream_options")
    return UsageOptions(bool(options.include_usage), bool(options.continuous_usage_stats))


def ignored_fields(request: BaseModel, neutral: Mapping[str, tuple[Any, ...]], strict: bool) -> list[str]:
    """Names of the unknown fields, at most 64. Raises for a known field that asks for something, and for an
    unknown one if `strict`."""
    extra = dict(request.model_extra or {})
    if isinstance(request, GenerationRequest) and request.stream_options is not None:
        extra |= {f"stream_options.{k}": v for k, v in (request.stream_options.model_extra or {}).items()}
    unknown = []
    for name, value in extra.items():
        if name in neutral:
            if value is not None and value not in neutral[name]:
                raise UnsupportedError(_unsupported_text(name, neutral[name]), param=name)
        elif name not in NO_EFFECT:
            unknown.append(name)
    names = [_printable(name) for name in unknown[:IGNORED_NAMES_MAX]]
    if names and strict:
        raise ApiError(400, f"Unknown field: {names[0]}.", code="unknown_parameter", param=names[0])
    return names


def _unsupported_text(name: str, neutral: tuple[Any, ...]) -> str:
    allowed = f"; leave it out or send {neutral[0]!r}" if neutral else "; leave it out"
    return f"{name} is not supported by this server{allowed}"


def _printable(name: str) -> str:
    """A client's field name, fit for a header and a log line."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name[:64])
    return safe or "?"


# Sampling fields whose name and meaning are the same in the request and in SamplingParams.
_SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "n",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)


def sampling_params(
    request: GenerationRequest, defaults: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    """The request's values over the model's defaults over vLLM's. `max_tokens`: the endpoint's default."""
    values: dict[str, Any] = dict(defaults)
    values["max_tokens"] = max_tokens if request.max_tokens is None else request.max_tokens
    values |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    for i, stop in enumerate([request.stop] if isinstance(request.stop, str) else request.stop or ()):
        text_of(f"stop[{i}]", stop)
    for i, word in enumerate(request.bad_words or ()):
        text_of(f"bad_words[{i}]", word)
    if request.n is not None and request.n > N_MAX:
        raise RejectedError(f"n is {request.n}, at most {N_MAX} choices are given", param="n")
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    renamed = {}
    match request:
        case ChatCompletionRequest():
            values["logprobs"] = _chat_logprobs(request)
            renamed["logprobs"] = "top_logprobs"
            if request.max_completion_tokens is not None:
                values["max_tokens"] = request.max_completion_tokens
                renamed["max_tokens"] = "max_completion_tokens"
        case CompletionRequest():
            values["logprobs"] = request.logprobs
            if request.echo and request.logprobs is not None:
                values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
            if request.best_of is not None and request.best_of != (request.n or 1):
                raise UnsupportedError(
                    f"best_of is {request.best_of}: only {request.n or 1}, the value of n, is served",
                    param="best_of",
                )
    try:
        return SamplingParams(**values)
    except RejectedError as e:
        wire = renamed.get(e.param or "")
        if wire is None:
            raise
        raise RejectedError(str(e).replace(e.param or "", wire, 1), param=wire) from e


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs is not None and request.top_logprobs != 0 and not request.logprobs:
        raise RejectedError("top_logprobs needs logprobs=true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise RejectedError("logit_bias has a key that is not a token id", param="logit_bias") from None
