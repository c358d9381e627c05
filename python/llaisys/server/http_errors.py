"""ApiError: HTTP errors as OpenAI's error object, with status and headers.

One table maps every class of `llaisys.errors`. A test fails on a class without a row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from fastapi.openapi.constants import REF_TEMPLATE
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope, Send

from llaisys import errors

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
CONTEXT_LENGTH = "context_length_exceeded"
REQUEST_TIMEOUT = "request_timeout"
# Statuses that any request may get: wrong Host, key or Origin, a slow or large body, a limit, a bug, or a
# server that is loading or shutting down.
COMMON_STATUSES = (400, 401, 403, 408, 413, 429, 500, 503)
RETRY_AFTER_MAX_S = 60
MESSAGE_CHARS_MAX = 2000
NO_RETRY = {"x-should-retry": "false"}

# Paths of the protocols whose errors differ from OpenAI's.
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
# HTTP status -> Anthropic's error type.
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The status with which Anthropic's API says that it is overloaded.
ANTHROPIC_OVERLOADED = 529

_encoder = msgspec.json.Encoder()


class ApiError(HTTPException):
    """An HTTP error response, or the error frame of a stream that has begun.

    `kind` is OpenAI's error `type`, `code` a stable identifier for programs, `param` the offending field.
    """

    def __init__(
        self, status: int, message: str, *, code: str, kind: str = INVALID_REQUEST, param: str | None = None
    ) -> None:
        if len(message) > MESSAGE_CHARS_MAX:  # the message may quote the client's input
            message = message[: MESSAGE_CHARS_MAX - 3] + "..."
        super().__init__(status, message)
        self.message = message
        self.code = code
        self.kind = kind
        self.param = param

    def with_headers(self, headers: Mapping[str, str]) -> ApiError:
        """Add response headers; return the same error."""
        self.headers = {**(self.headers or {}), **headers}
        return self

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ErrorDetail(BaseModel):
    """An error for people (`message`) and for programs (`code`). `param`: the invalid field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """An error for programs (`type`) and for people (`message`)."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaErrorAnswer(BaseModel):
    """Ollama's error object."""

    error: str


ERROR_MODELS = (ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer)


def error_responses(*statuses: int, model: type[BaseModel] = ErrorAnswer) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for its OpenAPI schema.

    They name their model (one of ERROR_MODELS) by reference: for `model`, FastAPI would build a validator for
    each status of each route, a tenth of the server's start.
    """
    names = {status.value: status.phrase for status in HTTPStatus}
    names |= {499: "Cancelled", ANTHROPIC_OVERLOADED: "Overloaded"}
    schema = {"$ref": REF_TEMPLATE.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": names[status], "content": content} for status in statuses}


@dataclass(frozen=True, slots=True)
class Row:
    """The response to one exception class. `message` None: use the exception's text."""

    status: int
    kind: str
    code: str
    message: str | None = None
    retry: bool = True


# Messages of 5xx are fixed, because details of a device or a bug belong in the log.
TABLE: Mapping[type[errors.LlaisysError], Row] = {
    errors.LlaisysError: Row(500, SERVER_ERROR, "internal_error", "internal error", retry=False),
    errors.RejectedError: Row(400, INVALID_REQUEST, "invalid_value"),
    errors.ContextLengthError: Row(400, INVALID_REQUEST, CONTEXT_LENGTH),
    errors.NotFoundError: Row(404, INVALID_REQUEST, "not_found"),
    errors.UnsupportedError: Row(400, INVALID_REQUEST, "unsupported_value"),
    errors.ExhaustedError: Row(429, "rate_limit_error", "server_overloaded"),
    errors.QueueFullError: Row(429, "rate_limit_error", "server_overloaded"),
    errors.RequestTimeoutError: Row(408, "timeout_error", REQUEST_TIMEOUT, retry=False),
    errors.RequestFailedError: Row(
        500, SERVER_ERROR, "request_failed", "this request failed in the engine", retry=False
    ),
    errors.SlowReaderError: Row(
        500, SERVER_ERROR, "slow_reader", "the stream was not read fast enough", retry=False
    ),
    errors.CoreFaultError: Row(
        500, SERVER_ERROR, "request_failed", "this request failed in the engine", retry=False
    ),
    errors.StorageError: Row(
        500, SERVER_ERROR, "storage_error", "the server's storage failed; see the server's log", retry=False
    ),
    errors.StorageFullError: Row(
        507, SERVER_ERROR, "storage_full", "the server's storage is full: nothing was saved", retry=False
    ),
    errors.StorageBusyError: Row(
        503, SERVER_ERROR, "storage_busy", "the server's storage is busy; try again in a moment"
    ),
    errors.EngineDeadError: (
        dead := Row(503, SERVER_ERROR, "engine_dead", "the engine has stopped; see the server's log")
    ),
    errors.InvariantError: dead,
}


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """Return the HTTP error for any exception. A 500 names the request id, which is also in the log."""
    if isinstance(error, ApiError):
        return error
    row = next((TABLE[c] for c in type(error).__mro__ if c in TABLE), TABLE[errors.LlaisysError])
    message = str(error) if row.message is None else row.message
    if row.status == 500:
        message = f"{message} (request id {request_id})"
    api_error = ApiError(
        row.status, message, code=row.code, kind=row.kind, param=getattr(error, "param", None)
    )
    if not row.retry:
        api_error.with_headers(NO_RETRY)
    elif row.status in (429, 503):
        api_error.with_headers({"retry-after": str(_retry_after_s(getattr(error, "retry_after_s", 1)))})
    return api_error


def _retry_after_s(estimate_s: float) -> int:
    """Return 1 to RETRY_AFTER_MAX_S seconds, randomized by 20 % so that clients do not retry
    simultaneously."""
    spread = random.uniform(0.8, 1.2)
    return min(RETRY_AFTER_MAX_S, max(1, round(estimate_s * spread)))


def model_not_found(name: str) -> ApiError:
    """Return 404: a model name that is not served."""
    return ApiError(404, f"The model `{name[:100]}` does not exist.", code="model_not_found", param="model")


def invalid_key() -> ApiError:
    """Return 401: no key, or an unknown one."""
    message = (
        "Incorrect API key provided, or none, or two: send one as `Authorization: Bearer KEY` or as "
        "`x-api-key: KEY`."
    )
    return ApiError(401, message, code="invalid_api_key").with_headers({"www-authenticate": "Bearer"})


def engine_dead() -> ApiError:
    """Return 503: the engine has died and accepts no requests."""
    return to_api_error(errors.EngineDeadError("the engine is not alive"), "")


def loading() -> ApiError:
    """Return 503: the model is not loaded yet."""
    message = "The model is still loading; try again in a moment."
    return ApiError(503, message, code="model_loading", kind=SERVER_ERROR).with_headers({"retry-after": "1"})


def shutting_down() -> ApiError:
    """Return 503: a new request after SIGTERM, or the error frame of a stream that the shutdown ends."""
    message = "The server is shutting down."
    return ApiError(503, message, code="shutting_down", kind=SERVER_ERROR).with_headers(
        {"retry-after": "5", "connection": "close"}
    )


def ended(reason: str) -> ApiError:
    """Return the error of a generation that was canceled (499, as in proxies), timed out (408) or failed
    (500)."""
    code = {"abort": "cancelled", "timeout": REQUEST_TIMEOUT}.get(reason, "request_failed")
    status = {"abort": 499, "timeout": 408}.get(reason, 500)
    api_error = ApiError(status, f"The request ended early: {code}.", code=code, kind=SERVER_ERROR)
    return api_error.with_headers(NO_RETRY)


def body_too_large(limit_bytes: int) -> ApiError:
    """Return 413: a body over the limit, as declared or as received."""
    return ApiError(413, f"The request body is larger than {limit_bytes} bytes.", code="request_too_large")


def bodies_too_large() -> ApiError:
    """Return 429: the bodies of all open requests are over their limit."""
    message = "The request bodies of all open requests have reached their limit; try again in a moment."
    api_error = ApiError(429, message, code="server_overloaded", kind="rate_limit_error")
    return api_error.with_headers({"retry-after": "1"})


def body_too_slow(seconds: float) -> ApiError:
    """Return 408: a body that did not arrive in time."""
    message = f"The request body did not arrive within {seconds:g} seconds."
    api_error = ApiError(408, message, code=REQUEST_TIMEOUT, kind="timeout_error")
    return api_error.with_headers({**NO_RETRY, "connection": "close"})


def too_many_open_requests(limit: int) -> ApiError:
    """Return 503: the server has reached its limit of open requests; the connection is closed."""
    message = f"The server has {limit} requests open, which is its limit; try again in a moment."
    api_error = ApiError(503, message, code="server_overloaded", kind=SERVER_ERROR)
    return api_error.with_headers({"retry-after": "1", "connection": "close"})


def too_many_open_requests_of_key(limit: int) -> ApiError:
    """Return 429: the client has too many open requests."""
    message = f"This key has {limit} requests open, which is its limit; wait until one has ended."
    api_error = ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
    return api_error.with_headers({"retry-after": "1"})


def too_many_requests_per_minute(limit: int, wait_s: int) -> ApiError:
    """Return 429: the client has sent too many requests per minute."""
    message = f"This key may send {limit} requests per minute; try again in {wait_s} s."
    api_error = ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
    return api_error.with_headers({"retry-after": str(wait_s)})


def to_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8. A lone surrogate, which JSON escapes allow, is written as an escape."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a lone surrogate, which msgspec refuses
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error object, as https://docs.anthropic.com/en/api/errors defines it."""
    # A timeout may have another status than 408 (`request_timeout_status`).
    status = 408 if error.code == REQUEST_TIMEOUT else error.status_code
    kind = ANTHROPIC_KINDS.get(status, INVALID_REQUEST if status < 500 else "api_error")
    # Anthropic's documented words, by which agents recognize that they must shorten the conversation.
    words = "prompt is too long: " if error.code == CONTEXT_LENGTH else ""
    return {"type": "error", "error": {"type": kind, "message": f"{words}{error.message}"}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return Ollama's error object: a text."""
    return {"error": error.message}


def error_response(error: ApiError, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of an error, in the format of the protocol that serves `path`."""
    status = error.status_code
    if path.startswith(ANTHROPIC_PATH):
        body = anthropic_error(error)
        status = ANTHROPIC_OVERLOADED if status == 503 else status
    elif path.startswith(OLLAMA_PATH):
        body = ollama_error(error)
    else:
        body = error.body()
    return status, {"content-type": "application/json", **(error.headers or {})}, to_json(body)


async def send_error(send: Send, scope: Scope, error: ApiError) -> None:
    """Send an error as an HTTP response, for middleware outside the application."""
    status, headers, raw = error_response(error, scope["path"])
    headers = {"content-length": str(len(raw)), **headers}
    start = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": raw})
