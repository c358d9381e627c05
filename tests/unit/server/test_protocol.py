"""Values, bounds and model names of a request. `test_fields.py` covers every field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.registry import ModelRegistry
from llaisys.server.fields import NO_EFFECT
from llaisys.server.state import ServerState

CHAT = "/v1/chat/completions"


async def test_request_values_override_model_defaults_override_defaults(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    engine.default_sampling_params = {"temperature": 0.2, "top_p": 0.9}
    await client.post(CHAT, json={**chat_body, "top_p": 0.5, "temperature": None})
    params = engine.calls[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.5, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"stream_options": {"include_usage": "maybe"}, "stream": True}, "stream_options.include_usage"),
        ({"seed": 2**63}, "seed"),
    ],
)
async def test_invalid_values_are_rejected_by_name(
    engine: FakeService,
    client: httpx.AsyncClient,
    chat_body: dict[str, Any],
    fields: dict[str, Any],
    param: str,
) -> None:
    response = await client.post(CHAT, json={**chat_body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["param"] == param
    assert param.split("[")[0] in response.json()["error"]["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_body"),
        (b"[]", "invalid_body"),
        (b'{"messages": [', "invalid_json"),
        (b'{"model": "\xff"}', "invalid_request"),
        (b"[" * 100_000, "invalid_request"),
    ],
)
async def test_bodies_that_are_not_requests_are_rejected(
    client: httpx.AsyncClient, raw: bytes, code: str
) -> None:
    response = await client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_a_form_is_rejected(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=b'{"messages": []}', headers={"content-type": "text/plain"})
    assert response.status_code == 400


async def test_input_is_never_echoed(client: httpx.AsyncClient, chat_body: dict[str, Any]) -> None:
    response = await client.post(CHAT, json={**chat_body, "temperature": "canary-7f3"})
    assert "canary-7f3" not in response.text


@pytest.mark.parametrize("name", sorted(NO_EFFECT - {"stream_options.include_obfuscation"}))
async def test_ignored_fields_are_accepted(
    client: httpx.AsyncClient, chat_body: dict[str, Any], name: str
) -> None:
    response = await client.post(CHAT, json={**chat_body, name: "x"})
    assert response.status_code == 200
    assert "x-llaisys-ignored-fields" not in response.headers


async def test_unknown_fields_are_named_and_bounded(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "include_obfuscation": True, "shiny": 1}
    response = await client.post(
        CHAT, json={**chat_body, "frobnicate": 1, "a\r\nx: 1": 2, "stream": True, "stream_options": options}
    )
    assert response.status_code == 200
    assert response.headers["x-llaisys-ignored-fields"] == "frobnicate,a??x??1,stream_options.shiny"
    response = await client.post(CHAT, json={**chat_body, **{f"field{i}": 1 for i in range(1000)}})
    assert response.headers["x-llaisys-ignored-fields"].count(",") == 63


async def test_unknown_fields_are_logged(
    client: httpx.AsyncClient, chat_body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "llaisys.request"):
        await client.post(CHAT, json={**chat_body, "frobnicate": "canary-7f3"})
    (record,) = caplog.records
    assert json.loads(record.getMessage())["ignored"] == "frobnicate"
    assert "canary-7f3" not in caplog.text


async def test_strict_fields_reject_an_unknown_field(
    engine: FakeService, make_client: Any, chat_body: dict[str, Any]
) -> None:
    async with make_client(ServerState(Config(strict_fields=True), models=ModelRegistry([engine]))) as client:
        response = await client.post(CHAT, json={**chat_body, "frobnicate": 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "frobnicate")
        assert (await client.post(CHAT, json={**chat_body, "user": "me", "tools": None})).status_code == 200


@pytest.mark.parametrize("name", [None, "", "default", "tiny"])
async def test_null_empty_and_default_name_the_first_model(
    client: httpx.AsyncClient, chat_body: dict[str, Any], name: str | None
) -> None:
    response = await client.post(CHAT, json={**chat_body, "model": name})
    assert response.json()["model"] == "tiny"


async def test_the_response_has_the_requested_model_name(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    assert (await client.post(CHAT, json={**chat_body, "model": "alias/of-tiny"})).json()[
        "model"
    ] == "alias/of-tiny"


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient, chat_body: dict[str, Any]) -> None:
    response = await client.post(CHAT, json={**chat_body, "model": "gpt-7"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model `gpt-7` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
