"""The table of errors covers the tree, and every error that leaves has OpenAI's shape."""

from __future__ import annotations

import inspect
import json

import httpx
import pytest

from llaisys import errors
from llaisys.server.http_errors import TABLE, ApiError, to_api_error, to_json


def tree() -> set[type[errors.LlaisysError]]:
    return {
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.LlaisysError)
    }


def test_every_class_has_its_row() -> None:
    assert set(TABLE) == tree()


@pytest.mark.parametrize("cls", sorted(TABLE, key=lambda c: c.__name__))
def test_rows(cls: type[errors.LlaisysError]) -> None:
    answer = to_api_error(cls("the words"), "req-1")
    assert 400 <= answer.status_code < 600
    shown = answer.body()["error"]
    assert set(shown) == {"message", "type", "param", "code"}
    assert ("req-1" in shown["message"]) == (answer.status_code == 500)
    assert ("the words" in shown["message"]) == (answer.status_code < 500)
    assert ("retry-after" in (answer.headers or {})) == (answer.status_code in (429, 503))


def test_a_subclass_is_answered_as_its_base() -> None:
    class Finer(errors.ContextLengthError):
        pass

    assert to_api_error(Finer("x", param="prompt"), "r").body()["error"]["param"] == "prompt"
    assert to_api_error(Finer("x"), "r").code == "context_length_exceeded"


def test_what_is_no_error_of_ours_says_nothing() -> None:
    answer = to_api_error(ValueError("/secret/path"), "req-1")
    assert answer.status_code == 500
    assert "/secret/path" not in answer.message


def test_an_api_error_stays_itself() -> None:
    error = ApiError(418, "short and stout", code="teapot")
    assert to_api_error(error, "r") is error


def test_json_can_always_be_sent() -> None:
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
    answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert ("allow" in answer.headers) == (status == 405)


def test_when_to_come_back_is_bounded_and_spread() -> None:
    def told(estimate_s: int) -> set[int]:
        error = errors.QueueFullError("full", retry_after_s=estimate_s)
        answers = (to_api_error(error, "") for _ in range(200))
        return {int((answer.headers or {})["retry-after"]) for answer in answers}

    assert told(0) == told(1) == {1}
    assert told(1000) == {60}
    spread = told(20)
    assert len(spread) > 1
    assert 16 <= min(spread) <= max(spread) <= 24
