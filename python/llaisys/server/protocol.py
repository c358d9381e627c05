"""Request bodies: the fields we serve are typed here, every other known field is in one of two tables.

A field is one of four: served (a class attribute), without effect (`NO_EFFECT`), known but not served
(`NEUTRAL`, accepted while null or neutral, else a 400 that names it), or unknown (accepted and named in the
header `x-llaisys-ignored-fields`; a 400 with `--strict-fields`). Null means absent everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.server.checks import text_of
from llaisys.server.errors import ApiError
from llaisys.types import SamplingParams

LOGIT_BIAS_MAX = 300
IGNORED_NAMES_MAX = 64

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
        "stream_options.include_obfuscation",
    }
)

# Known to OpenAI's or vLLM's API and not served: field -> values that ask for nothing (null always does).
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "priority": (0,),
    "cache_salt": ("",),
    "request_id": ("",),
    "session_id": ("",),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "stream_interval": (1,),
}

CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
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
    "echo": (False,),
    "add_special_tokens": (False,),
}

COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}


class StreamOptions(BaseModel):
    """`stream_options`: usage in a last chunk of its own, or in every chunk."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints share. Ranges are checked once, by SamplingParams."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[Any]
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """When a stream states its usage: in a chunk before `[DONE]`, and in every chunk."""

    at_end: bool
    in_every_chunk: bool


def usage_options(request: GenerationRequest) -> UsageOptions:
    """Raises RejectedError for stream_options without stream."""
    options = request.stream_options
    if options is None:
        return UsageOptions(False, False)
    if not request.stream:
        raise RejectedError("stream_options needs stream=true", param="stream_options")
    return UsageOptions(bool(options.include_usage), bool(options.continuous_usage_stats))


def ignored_fields(
    request: GenerationRequest, neutral: Mapping[str, tuple[Any, ...]], strict: bool
) -> list[str]:
    """Names of the unknown fields, at most 64. Raises for a known field that asks for something, and for an
    unknown one if `strict`."""
    extra = dict(request.model_extra or {})
    if request.stream_options is not None:
        extra |= {f"stream_options.{k}": v for k, v in (request.stream_options.model_extra or {}).items()}
    unknown = []
    for name, value in extra.items():
        if name in neutral:
            if value is not None and value not in neutral[name]:
                raise UnsupportedError(_unsupported_text(name, neutral[name]), param=name)
        elif name not in NO_EFFECT:
            unknown.append(_printable(name))
    if unknown and strict:
        raise ApiError(400, f"Unknown field: {unknown[0]}.", code="unknown_parameter", param=unknown[0])
    return unknown[:IGNORED_NAMES_MAX]


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
    if len(bias) > LOGIT_BIAS_MAX:
        raise RejectedError(
            f"logit_bias has {len(bias)} entries, at most {LOGIT_BIAS_MAX}", param="logit_bias"
        )
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise RejectedError("logit_bias has a key that is not a token id", param="logit_bias") from None
