"""Request ids, and one log line per request."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import EngineDeadError, RequestTimeoutError
from llaisys.server.access_log import clean_request_id
from llaisys.server.middleware.auth import Keyring
from llaisys.server.state import ServerState


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("abc-1_2.3", "abc-1_2.3"),
        ("a b\tc", "abc"),
        ("x" * 100, "x" * 64),
        ("日本", ""),
        (None, ""),
    ],
)
def test_request_ids_are_cleaned(sent: str | None, kept: str) -> None:
    assert clean_request_id(sent) == kept


async def test_the_request_id_is_returned(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/nothing"):
        assert (await client.get(path, headers={"x-request-id": "mine-1"})).headers[
            "x-request-id"
        ] == "mine-1"
    first, second = [(await client.get("/livez")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    rejected = await client.get("/v1/models", headers={"host": "evil.example"})
    assert rejected.headers["x-request-id"]


async def test_the_header_with_the_id_can_be_turned_off(
    make_client: Callable[..., httpx.AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "llaisys.request")
    async with make_client(ServerState(Config(enable_request_id_headers=False))) as client:
        for path in ("/livez", "/v1/models", "/nothing"):
            response = await client.get(path, headers={"x-request-id": "mine-1"})
            assert "x-request-id" not in response.headers
    assert [line_of(record)["request_id"] for record in caplog.records] == ["mine-1"] * 3


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    """Parse a log record as JSON, after checking that it is one line."""
    text = record.getMessage()
    assert "\n" not in text
    made: dict[str, Any] = json.loads(text)
    return made


async def test_one_log_line_per_request_without_secrets(
    make_client: Callable[..., httpx.AsyncClient], state: ServerState, caplog: pytest.LogCaptureFixture
) -> None:
    state.keys = Keyring.of(Config(api_key=("canary-4",)))
    body = {"prompt": "canary-2", "user": "canary-3", "max_tokens": 5, "stop": ["canary-5"]}
    headers = {"authorization": "Bearer canary-4", "x-request-id": "mine-1", "cookie": "canary-6"}
    async with make_client(state, **headers) as client:
        with caplog.at_level(logging.DEBUG, "llaisys"):
            await client.post("/v1/completions?api_key=canary-1", json=body)
    (line,) = map(line_of, (r for r in caplog.records if r.name == "llaisys.request"))
    assert "canary" not in caplog.text
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert re.fullmatch(r"[0-9a-f]{16}", line.pop("key"))
    assert 0 <= line.pop("queued_s") <= line.pop("first_token_s") <= line.pop("seconds")
    assert line == {
        "request_id": "mine-1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "tiny",
        "n": 1,
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "stream": False,
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "end_reason": "stop",
    }


async def test_a_client_cannot_forge_a_log_line(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "llaisys.request"):
        await client.get('/a%0a{"status":200}' + "x" * 1000)
    (line,) = map(line_of, caplog.records)
    assert line["path"] == ('/a\n{"status":200}' + "x" * 1000)[:200]
    assert line["status"] == 404


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([Piece(["a"]), Piece(["b"], "length", index=1), Piece(["c"], "stop")], "length,stop"),
        ([Piece(["a"]), RequestTimeoutError("old")], "request_timeout"),
        ([EngineDeadError("gone")], "engine_dead"),
    ],
)
async def test_the_log_line_has_the_end_reason(
    client: httpx.AsyncClient,
    engine: FakeService,
    caplog: pytest.LogCaptureFixture,
    script: list[Piece | Exception],
    reason: str,
) -> None:
    engine.script = script
    with caplog.at_level(logging.INFO, "llaisys.request"):
        for stream in (True, False):
            await client.post("/v1/completions", json={"prompt": "a", "n": 2, "stream": stream})
    for stream, line in zip((True, False), map(line_of, caplog.records), strict=True):
        assert (line["end_reason"], line["stream"]) == (reason, stream)


async def test_a_rejected_request_is_logged(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llaisys.request"):
        await client.post("/v1/completions", json={"prompt": []})
    (line,) = map(line_of, caplog.records)
    assert (line["status"], line["end_reason"]) == (400, "invalid_value")


async def test_reads_are_logged_at_debug_level(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "llaisys.request"):
        await client.get("/health")
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
