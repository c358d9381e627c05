"""Values, bounds and model names of a request. `test_fields.py` covers every field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fakes.service import FakeService
from llaisys.config import Config
from llaisys.registry import ModelRegistry
from llaisys.server.fields import NO_EFFECT
from llaisys.server.state import ServerState
from sse import chunks

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add"}}


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
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [[5, 1], ["Hi", 1]]}, "logit_bias"),
        ({"logit_bias": [[5, 1, 2]]}, "logit_bias"),
        ({"logit_bias": [[5, 1]] * 301}, "logit_bias"),
        ({"logit_bias": 5}, "logit_bias"),
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


async def test_a_key_that_is_no_token_id_is_named(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    response = await client.post(CHAT, json={**chat_body, "logit_bias": {"bad1": 1}})
    assert "logit_bias has the key 'bad1'" in response.json()["error"]["message"]


async def test_logit_bias_has_two_forms(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    for bias in ({"5": 1.5, "7": -2}, [[5, 1.5], [7, -2]], [[5, 1.5], [7, False]]):
        assert (await client.post(CHAT, json={**chat_body, "logit_bias": bias})).status_code == 200
    expected = [{5: 1.5, 7: -2}, {5: 1.5, 7: -2}, {5: 1.5, 7: -100}]
    assert [call.params.logit_bias for call in engine.calls] == expected


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"logit_bias": [[5, 1.5], ["Hi", -1]]}, "the entry ['Hi', -1]"),
        ({"logit_bias": [[5, True]]}, "the entry [5, True]"),
        ({"logit_bias": [[5]]}, "the entry [5]"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "names 'sub'"),
    ],
)
async def test_errors_name_the_value(
    client: httpx.AsyncClient, chat_body: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    response = await client.post(CHAT, json={**chat_body, **more})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/completions", {"prompt": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/embeddings", {"input": "Hi"}),
    ],
)
async def test_routes_are_also_served_without_v1(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    short, full = [await client.post(each, json=body) for each in (path, f"/v1{path}")]
    assert short.status_code == 200
    assert short.json().keys() == full.json().keys()
    assert short.json().get("choices") == full.json().get("choices")


async def test_the_models_are_also_listed_without_v1(client: httpx.AsyncClient) -> None:
    assert (await client.get("/models")).json() == (await client.get("/v1/models")).json()


async def test_the_fingerprint_is_the_engines(
    client: httpx.AsyncClient, chat_body: dict[str, Any], engine: FakeService
) -> None:
    for path, body in ((CHAT, chat_body), ("/v1/completions", {"prompt": "Hi"})):
        assert (await client.post(path, json=body)).json()["system_fingerprint"] == engine.system_fingerprint


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
@pytest.mark.parametrize("is_forced", [False, True])
async def test_the_usage_of_streams_can_be_forced(
    engine: FakeService,
    make_client: Callable[..., httpx.AsyncClient],
    chat_body: dict[str, Any],
    options: dict[str, Any],
    is_forced: bool,
) -> None:
    config = Config(enable_force_include_usage=is_forced)
    state = ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]  # as in conftest
    async with make_client(state) as client:
        streamed = await client.post(CHAT, json={**chat_body, "stream": True, **options})
        whole = await client.post(CHAT, json=chat_body)
    assert bool(chunks(streamed.content)[-1].get("usage")) is is_forced
    assert whole.json()["usage"]["completion_tokens"] == 3


async def test_a_list_of_prompts_is_of_one_kind(client: httpx.AsyncClient, engine: FakeService) -> None:
    response = await client.post("/v1/completions", json={"prompt": [[1, 2], "x"]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert not engine.calls
