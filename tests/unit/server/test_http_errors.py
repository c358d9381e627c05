"""The error table covers every error class, and every error response has the shape of OpenAI errors."""

from __future__ import annotations

import inspect
import json

import httpx
import pytest

from llaisys import errors
from llaisys.server.http_errors import TABLE, ApiError, error_response, to_api_error, to_json


def tree() -> set[type[errors.LlaisysError]]:
    return {
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.LlaisysError)
    }


def test_every_error_class_has_a_row() -> None:
    assert set(TABLE) == tree()


@pytest.mark.parametrize("cls", sorted(TABLE, key=lambda c: c.__name__))
def test_status_and_code_of_each_row(cls: type[errors.LlaisysError]) -> None:
    response = to_api_error(cls("the words"), "req-1")
    assert 400 <= response.status_code < 600
    shown = response.body()["error"]
    assert set(shown) == {"message", "type", "param", "code"}
    assert ("req-1" in shown["message"]) == (response.status_code == 500)
    assert ("the words" in shown["message"]) == (response.status_code < 500)
    assert ("retry-after" in (response.headers or {})) == (response.status_code in (429, 503))


def test_a_subclass_has_the_status_of_its_base() -> None:
    class Finer(errors.ContextLengthError):
        pass

    assert to_api_error(Finer("x", param="prompt"), "r").body()["error"]["param"] == "prompt"
    assert to_api_error(Finer("x"), "r").code == "context_length_exceeded"


def test_an_unknown_exception_shows_no_details() -> None:
    response = to_api_error(ValueError("/secret/path"), "req-1")
    assert response.status_code == 500
    assert "/secret/path" not in response.message


def test_an_api_error_is_unchanged() -> None:
    error = ApiError(418, "short and stout", code="teapot")
    assert to_api_error(error, "r") is error


def test_any_string_can_be_encoded_as_json() -> None:
    text = 'half \ud800 pair, 天, "quoted"\n'
    raw = to_json({"text": text})
    raw.decode("utf-8")
    assert json.loads(raw)["text"] == text
    assert "天".encode() in raw


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/assets/nothing.js", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "not_found"),
    ],
)
async def test_errors_of_the_framework(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("allow" in response.headers) == (status == 405)


def test_retry_after_is_bounded_and_jittered() -> None:
    def retry_after_values(estimate_s: int) -> set[int]:
        error = errors.QueueFullError("full", retry_after_s=estimate_s)
        responses = (to_api_error(error, "") for _ in range(200))
        return {int((response.headers or {})["retry-after"]) for response in responses}

    assert retry_after_values(0) == retry_after_values(1) == {1}
    assert retry_after_values(1000) == {60}
    spread = retry_after_values(20)
    assert len(spread) > 1
    assert 16 <= min(spread) <= max(spread) <= 24


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v1/chat/completions", 503, {"message": "busy", "type": "t", "param": None, "code": "c"}),
        ("/v1/messages", 529, {"type": "overloaded_error", "message": "busy"}),
        ("/api/chat", 503, "busy"),
    ],
)
def test_an_error_has_the_format_of_the_protocol(path: str, status: int, body: object) -> None:
    error = ApiError(503, "busy", code="c", kind="t").with_headers({"retry-after": "1"})
    given, headers, raw = error_response(error, path)
    assert given == status
    assert headers == {"content-type": "application/json", "retry-after": "1"}
    assert json.loads(raw)["error"] == body


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_every_status_has_a_type_of_anthropics(status: int, kind: str) -> None:
    given, _, raw = error_response(ApiError(status, "m", code="c"), "/v1/messages/count_tokens")
    assert given == status
    assert json.loads(raw) == {"type": "error", "error": {"type": kind, "message": "m"}}


def test_a_timeout_is_anthropics_timeout_whatever_its_status() -> None:
    given, _, raw = error_response(ApiError(499, "m", code="request_timeout"), "/v1/messages")
    assert given == 499
    assert json.loads(raw)["error"]["type"] == "timeout_error"
