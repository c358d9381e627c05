"""Reads requests: the JSON body, its options for the engine, and the sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from llaisys.async_llm import AsyncLLM
from llaisys.body import InvalidField, parse_body
from llaisys.config import Config
from llaisys.errors import LlaisysError, RejectedError, UnsupportedError
from llaisys.sampling_params import RequestOutputKind, SamplingParams
from llaisys.server.access_log import ignored_headers
from llaisys.server.fields import ignored_fields
from llaisys.server.http_errors import ApiError, to_api_error
from llaisys.server.request_schemas import (
    CACHE_SALT_CHARS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    OpenRequest,
    PairRequest,
)
from llaisys.server.state import state_of
from llaisys.session_client import check_name

# Maximum choices of one prompt over HTTP.
N_MAX = 8
PRIORITY_MAX = 2**31 - 1

# Sampling fields with the same name and meaning in requests and in SamplingParams.
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
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "truncation_side",
)

# Bodies up to this size are parsed on the event loop, in 1 ms (10 ms in the worst case). Larger ones are sent
# to a worker process, which costs 0.2 ms and a thread.
INLINE_BYTES_MAX = 64 << 10
# Maximum characters of a client's field name in an error.
NAME_CHARS_MAX = 64

# Error texts of fields with several types, in place of pydantic's error for the first type that it tried.
UNIONS = {
    "stop": "must be a string or a list of strings",
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "input": "must be a string or a list of what this route accepts: texts or token ids, or input items",
    "guided_json": "must be a JSON schema, an object or its text",
    "tool_choice": "must be a string or an object",
    "system": "must be a string or a list of content blocks",
    **dict.fromkeys(
        ("documents", "queries", "text_1", "text_2", "data_1", "data_2"),
        "must be a text, or a list of texts or of objects with a text",
    ),
}


def engine_of(
    request: Request, body: OpenRequest, neutral: Mapping[str, tuple[Any, ...]]
) -> tuple[AsyncLLM, dict[str, str]]:
    """Return the model that a body names, and the headers that name ignored fields.

    `neutral`: known but unsupported fields with their accepted values. Raises the errors of
    `ServerState.serving` and `ignored_fields`.
    """
    state = state_of(request)
    engine = state.serving(body.model)
    return engine, ignored_headers(request, ignored_fields(body, neutral, state.config.strict_fields))


def served_name(engine: AsyncLLM, model: str | None) -> str:
    """Return the model name for the response: the requested one, or the first."""
    is_served = model in engine.model_names or engine.loras.find(model) is not None
    return str(model) if is_served else engine.model_names[0]


def text_of(param: str, value: Any) -> str:
    """Return `value` if it is a string that can be encoded. Raises RejectedError naming `param`.

    A JSON escape can contain half of a surrogate pair, which no tokenizer and no response can represent.
    """
    if not isinstance(value, str):
        raise RejectedError(f"{param} must be a string", param=param)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RejectedError(
            f"{param} contains half of a surrogate pair, which is not valid text", param=param
        ) from None
    return value


@contextmanager
def field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors raised in this context: `names` maps a field to the one that the client
    sent.

    A field may be a path such as `tools[0].function`; the longest one that the error's field begins with
    applies.
    """
    try:
        yield
    except LlaisysError as e:
        given = e.param or ""
        fields = [each for each in names if given == each or given.startswith((f"{each}.", f"{each}["))]
        if not fields:
            raise
        field = max(fields, key=len)
        name = names[field]
        raise type(e)(str(e).replace(field, name, 1), param=name + given[len(field) :]) from e


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """Where a stream reports its usage: in a chunk before `[DONE]`, or in every chunk."""

    at_end: bool
    in_every_chunk: bool


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """The requested parts and format of a response.

    - `n`: choices of each prompt. `n_top`: number of best candidates per token with logprobs; None without.
      `n_echo_top`: the same for the tokens of an echoed prompt.
    - `token_ids`: include the ids of prompt and completion. `ids_as_tokens`: logprobs have ids instead of
      texts.
    - `prompt_logprobs`: include them. `echo`: begin with the prompt. `stream`: send server-sent events.
    - `metrics`: include the times of the request, which has one choice.
    """

    usage: UsageOptions
    n: int = 1
    n_top: int | None = None
    n_echo_top: int = 0
    token_ids: bool = False
    ids_as_tokens: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    stream: bool = False
    metrics: bool = False


def response_options(
    request: GenerationRequest, params: SamplingParams, config: Config, n_prompts: int = 1
) -> ResponseOptions:
    """Return the response options. `config`: has what the server adds to every response.

    Raises RejectedError for options that need or exclude a stream.
    """
    if request.stream and request.prompt_logprobs is not None:
        raise RejectedError("prompt_logprobs cannot be streamed: leave out stream", param="prompt_logprobs")
    return ResponseOptions(
        usage=usage_options(request, config.enable_force_include_usage),
        n=params.n,
        # `logprob_token_ids` adds its ids to the sampled token.
        n_top=len(params.logprob_token_ids) + 1 if params.logprob_token_ids else params.logprobs,
        n_echo_top=request.logprobs or 0 if isinstance(request, CompletionRequest) else 0,
        token_ids=bool(request.return_token_ids),
        ids_as_tokens=bool(request.return_tokens_as_token_ids),
        prompt_logprobs=request.prompt_logprobs is not None,
        echo=bool(request.echo),
        stream=bool(request.stream),
        metrics=config.enable_per_request_metrics and params.n == n_prompts == 1,
    )


def engine_options(
    request: GenerationRequest | EmbeddingRequest | PairRequest,
    client_id: str,
    engine: AsyncLLM,
    sharing: Literal["per-key", "all"] = "per-key",
) -> dict[str, Any]:
    """Return the engine's arguments other than prompt and sampling parameters. Raises RejectedError.

    `engine`: has the LoRA adapter that `request.model` may name. `sharing`: the clients that share cached
    prefixes. With keys (`client_id` is not empty), a client can only
    lower its priority, with a number above 0.
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
        "lora_request": engine.loras.find(request.model),
    }


def usage_options(request: GenerationRequest, forces_usage: bool) -> UsageOptions:
    """Return the usage options. Raises RejectedError for stream_options without stream."""
    options = request.stream_options
    if options is None:
        return UsageOptions(forces_usage and bool(request.stream), False)
    if not request.stream:
        raise RejectedError("stream_options needs stream=true", param="stream_options")
    return UsageOptions(bool(options.include_usage) or forces_usage, bool(options.continuous_usage_stats))


def prediction_text(prediction: Mapping[str, Any]) -> str:
    """Return the text of OpenAI's `prediction`. Raises RejectedError naming the field."""
    if prediction.get("type") != "content":
        raise RejectedError("prediction.type must be 'content'", param="prediction.type")
    if unknown := prediction.keys() - {"type", "content"}:
        name = f"prediction.{min(unknown)}"
        raise RejectedError(f"{name} is not a field of prediction", param=name)
    content = prediction.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for i, part in enumerate(parts):
        name = f"prediction.content[{i}]" if isinstance(content, list) else "prediction.content"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RejectedError(f"{name} must be a part of type 'text'", param=name)
        texts.append(text_of(name, part.get("text")))
    return "".join(texts)


def sampling_params(
    request: GenerationRequest, defaults: Mapping[str, Any], max_tokens: int | None
) -> SamplingParams:
    """Return the sampling parameters. Precedence: the request's values, the model's defaults, vLLM's
    defaults.

    `max_tokens`: the default of the endpoint.
    """
    values: dict[str, Any] = {**defaults, "output_kind": RequestOutputKind.DELTA}
    values["max_tokens"] = max_tokens if request.max_tokens is None else request.max_tokens
    values |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    for i, stop in enumerate([request.stop] if isinstance(request.stop, str) else request.stop or ()):
        text_of(f"stop[{i}]", stop)
    for i, word in enumerate(request.bad_words or ()):
        text_of(f"bad_words[{i}]", word)
    if request.n is not None and request.n > N_MAX:
        raise RejectedError(f"n is {request.n}, allowed are up to {N_MAX} choices", param="n")
    if request.logit_bias:
        values["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    renamed = {}
    match request:
        case ChatCompletionRequest():
            values["logprobs"] = _chat_logprobs(request)
            renamed["logprobs"] = "top_logprobs"
            if request.max_completion_tokens is not None:
                values["max_tokens"] = request.max_completion_tokens
                renamed["max_tokens"] = "max_completion_tokens"
            if request.prediction is not None:
                values["prediction"] = prediction_text(request.prediction)
        case CompletionRequest():
            values["logprobs"] = request.logprobs
            if request.echo and request.logprobs is not None:
                values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
            if request.best_of is not None and request.best_of != (request.n or 1):
                raise UnsupportedError(
                    f"best_of is {request.best_of}: only {request.n or 1}, the value of n, is supported",
                    param="best_of",
                )
    if request.logprob_token_ids:
        if values["logprobs"] is None:
            raise RejectedError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        values["logprobs"] = None
    with field_names(renamed):
        return SamplingParams(**values)


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs is not None and request.top_logprobs != 0 and not request.logprobs:
        raise RejectedError("top_logprobs needs logprobs=true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise RejectedError(
            f"logit_bias has the key {key[:NAME_CHARS_MAX]!r}, which is not a token id", param="logit_bias"
        ) from None


class BodyRequest(Request):
    """A request whose `json` is bounded, and parsed and validated in another process if it is large.

    FastAPI validates the value again, which takes 35 ms on the event loop for the largest valid body (a
    million token ids), and stops at the first error.
    """

    model: str | None = None

    async def json(self) -> Any:
        """Return the value of the body.

        Raises json.JSONDecodeError, or ApiError for a body that is not JSON, exceeds a bound, or is large and
        invalid.
        """
        if not hasattr(self, "_json"):
            raw = await self.body()
            try:
                invalid = None
                if len(raw) <= INLINE_BYTES_MAX:
                    self._json = parse_body(raw)
                else:
                    self._json, invalid = await state_of(self).registry().read_body(raw, self.model)
            except LlaisysError as e:
                raise to_api_error(e, self.state.request_id) from e
            except json.JSONDecodeError:
                raise
            except (ValueError, RecursionError):
                raise ApiError(400, "The request cannot be read.", code="invalid_request") from None
            if invalid is not None:
                raise field_error(invalid)
        return self._json


class BodyRoute(APIRoute):
    """A route that reads a JSON body. A test verifies that every POST, PUT and PATCH has this class."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Use BodyRequest, as FastAPI documents it for custom request classes."""
        handle = super().get_route_handler()
        body: Any = None if self.body_field is None else self.body_field.field_info.annotation
        model = None if body is None else f"{body.__module__}:{body.__qualname__}"

        async def handle_body(request: Request) -> Response:
            wrapped = BodyRequest(request.scope, request.receive)
            wrapped.model = model
            return await handle(wrapped)

        return handle_body


class OllamaRoute(BodyRoute):
    """A route of Ollama's API: the body is JSON whatever its content type says, as in Ollama.

    LiteLLM sends no content type, and curl without `-H` that of a form. Other web sites cannot use this,
    because HostMiddleware checks the origin.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handle each request as one with the content type of JSON."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
            headers.append((b"content-type", b"application/json"))
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return handle_json


def field_error(invalid: InvalidField) -> ApiError:
    """Return the error for an invalid field. Its path has the form `messages[0].role`."""
    path, kind, message = invalid
    if not path and kind != "too_long":
        return ApiError(400, "The body must be a JSON object, sent as application/json.", code="invalid_body")
    if path and str(path[0]) in UNIONS:  # the rest of pydantic's path has the types that it tried
        path = path[:1]
        if kind not in ("missing", "too_long"):
            message = UNIONS[str(path[0])]
            return ApiError(400, f"{path[0]} {message}", code="invalid_type", param=str(path[0]))
    named = (f"[{part}]" if isinstance(part, int) else f".{part[:NAME_CHARS_MAX]}" for part in path)
    param = "".join(named)[1:] or None
    if kind == "too_long":
        return ApiError(400, f"{param or 'The body'} {message}", code="invalid_value", param=param)
    code = "missing_required_parameter" if kind == "missing" else "invalid_type"
    return ApiError(400, f"{param}: {message}", code=code, param=param)


def cache_salt(client_id: str, salt: str, sharing: Literal["per-key", "all"]) -> str:
    """Return the salt of a request's cached prefixes.

    With keys, and unless all clients share prefixes, each client has different salts for any `salt` that it
    sends. A client's name contains no `/`.
    """
    return f"{client_id}/{salt}" if client_id and sharing == "per-key" else salt


def engine_id(client_id: str, id: str) -> str:
    """Return the engine's id of a client's request, which is different from those of other clients.

    Neither a client's name nor a request id contains `/`.
    """
    return f"{client_id}/{id}" if client_id else id
