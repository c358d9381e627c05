"""Request ids in and out, and the one log line."""

from __future__ import annotations

import logging

import httpx
import pytest

from llaisys.server.trace import clean_request_id


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
def test_labels_are_cleaned(sent: str | None, kept: str) -> None:
    assert clean_request_id(sent) == kept


async def test_the_id_comes_back(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/nothing"):
        assert (await client.get(path, headers={"x-request-id": "mine-1"})).headers[
            "x-request-id"
        ] == "mine-1"
    first, second = [(await client.get("/livez")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    refused = await client.get("/v1/models", headers={"host": "evil.example"})
    assert refused.headers["x-request-id"]


async def test_one_line_a_request_and_no_secrets(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "llaisys.server"):
        await client.post(
            "/v1/completions?api_key=canary-1",
            json={"prompt": "canary-2", "user": "canary-3"},
            headers={"authorization": "Bearer canary-4", "x-request-id": "mine-1"},
        )
        await client.get("/a%0aforged%20line")
    first, second = (record.getMessage() for record in caplog.records)
    assert "canary" not in caplog.text
    assert "POST '/v1/completions' status=200" in first
    assert "request_id=mine-1" in first
    assert "outcome=done prompt_tokens=8 completion_tokens=3" in first
    assert "\n" not in second


async def test_reading_is_logged_quietly(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "llaisys.server"):
        await client.get("/health")
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]
