"""POST /v1/embeddings on a scripted engine whose vectors are the prompt ids: forms, fields and rejections."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from openai.types import embedding_create_params

from fakes.service import Call, FakeService
from llaisys.config import Config
from llaisys.errors import ContextLengthError, RejectedError, UnsupportedError
from llaisys.server.fields import EMBEDDING_NEUTRAL, NO_EFFECT
from llaisys.server.request_schemas import EmbeddingRequest
from llaisys.server.routes.embeddings import CONCURRENT_INPUTS_MAX, INPUTS_MAX

URL = "/v1/embeddings"
D_MODEL = FakeService().model_info.d_model
VLLM = {"truncate_prompt_tokens", "add_special_tokens", "priority", "cache_salt", "request_id", "messages"}
HI = [72.0, 105.0]
JSON = {"content-type": "application/json"}


async def vectors(client: httpx.AsyncClient, given: Any, **more: Any) -> list[Any]:
    response = await client.post(URL, json={"input": given, **more})
    assert response.status_code == 200, response.text
    body = response.json()
    assert [(e["object"], e["index"]) for e in body["data"]] == [
        ("embedding", i) for i in range(len(body["data"]))
    ]
    return [e["embedding"] for e in body["data"]]


@pytest.mark.parametrize(
    ("given", "want"),
    [("Hi", [HI]), (["Hi", "i"], [HI, [105]]), ([72, 105], [HI]), ([[1], [2, 3]], [[1], [2, 3]])],
)
async def test_the_four_forms_of_input(client: httpx.AsyncClient, given: Any, want: list[Any]) -> None:
    assert await vectors(client, given) == want


async def test_the_response_has_the_openai_fields(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"input": ["Hi", "i"], "model": "alias/of-tiny"})
    assert response.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": HI},
            {"object": "embedding", "index": 1, "embedding": [105.0]},
        ],
        "model": "alias/of-tiny",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


async def test_base64_is_little_endian_float32(client: httpx.AsyncClient) -> None:
    (text,) = await vectors(client, "Hi", encoding_format="base64")
    assert base64.b64decode(text, validate=True) == struct.pack("<2f", *HI)
    assert await vectors(client, "Hi", encoding_format="float") == [HI]


async def test_a_long_list_keeps_its_order_and_bounds_its_open_requests(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    given = [[i] for i in range(INPUTS_MAX)]
    assert await vectors(client, given) == given
    assert engine.n_open_most == CONCURRENT_INPUTS_MAX
    engine.n_open_most, engine.config = 0, Config(max_num_seqs=3)
    await vectors(client, given[:20])
    assert engine.n_open_most == 3


SERVED: Mapping[str, tuple[Any, Callable[[Call], Any], Any]] = {
    "input": ("Hi", lambda call: call.prompt, "Hi"),
    "model": ("alias/of-tiny", lambda call: call.prompt, "Hi"),
    "encoding_format": ("float", lambda call: call.prompt, "Hi"),
    "dimensions": (D_MODEL, lambda call: call.prompt, "Hi"),
    "truncate_prompt_tokens": (1, lambda call: call.params.truncate_prompt_tokens, 1),
    "truncation_side": ("right", lambda call: call.params.truncation_side, "right"),
    "add_special_tokens": (False, lambda call: call.options["add_special_tokens"], False),
    "normalize": (False, lambda call: call.options["normalize"], False),
    "priority": (-3, lambda call: call.options["priority"], -3),
    "cache_salt": ("mine", lambda call: call.options["cache_salt"], "mine"),
    "request_id": ("my-1", lambda call: call.request_id, "embd-my-1-0"),
}


# `test_messages_are_rendered_by_the_chat_template` uses them.
OF_CHATS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}


def test_every_known_field_is_in_one_table() -> None:
    known = set(embedding_create_params.EmbeddingCreateParams.__annotations__) | VLLM
    served = set(EmbeddingRequest.model_fields)
    assert known <= served | set(EMBEDDING_NEUTRAL) | NO_EFFECT
    assert not served & set(EMBEDDING_NEUTRAL)
    assert set(SERVED) | OF_CHATS == served


@pytest.mark.parametrize("field", SERVED)
async def test_a_supported_field_takes_effect(
    engine: FakeService, client: httpx.AsyncClient, field: str
) -> None:
    value, shows, want = SERVED[field]
    response = await client.post(URL, json={"input": "Hi", field: value})
    assert response.status_code == 200, response.text
    assert shows(engine.calls[0]) == want
    assert engine.calls[0].options["pooling"] == "last"
    assert (await client.post(URL, json={"input": "Hi", field: None})).status_code == (
        400 if field == "input" else 200
    )


@pytest.mark.parametrize("field", EMBEDDING_NEUTRAL)
async def test_an_unsupported_field_is_rejected(client: httpx.AsyncClient, field: str) -> None:
    for neutral in (None, *EMBEDDING_NEUTRAL[field]):
        assert (await client.post(URL, json={"input": "Hi", field: neutral})).status_code == 200
    response = await client.post(URL, json={"input": "Hi", field: {"asks": "for something"}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["Hi", 7]}, "input[1]"),
        ({"input": ["Hi", "\ud800"]}, "input[1]"),
        ({"input": [[1]] * (INPUTS_MAX + 1)}, "input"),
        ({"input": {"text": "Hi"}}, "input"),
        ({}, "input"),
        ({"input": "Hi", "messages": [{"role": "user", "content": "Hi"}]}, "input"),
        ({"messages": [], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"input": [[1, 2], "x"]}, "input"),
        ({"input": "Hi", "dimensions": D_MODEL + 1}, "dimensions"),
        ({"input": "Hi", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "Hi", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "Hi", "priority": 2**31}, "priority"),
        ({"input": "Hi", "request_id": "a b"}, "request_id"),
    ],
)
async def test_an_invalid_value_is_rejected_by_name(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await client.post(URL, content=json.dumps(body), headers=JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert param in response.json()["error"]["message"]
    assert not engine.calls


async def test_an_engine_rejection_names_the_input(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.embedding_error = ContextLengthError("the prompt has 9 tokens, the context is 8", param="prompt")
    error = (await client.post(URL, json={"input": ["Hi", "i"]})).json()["error"]
    assert error["message"] == "the input has 9 tokens, the context is 8"
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    engine.embedding_error = RejectedError("request id 'x' is in use", param="request_id")
    assert (await client.post(URL, json={"input": "Hi"})).json()["error"]["param"] == "request_id"
    assert all(call.ended for call in engine.calls)


async def test_a_model_with_another_pooling_type_is_rejected(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    engine.embedding_error = UnsupportedError("tiny makes embeddings with cls")
    response = await client.post(URL, json={"input": "Hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_value")
    assert not engine.calls


async def test_unknown_fields_and_models(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"input": "Hi", "color": 1})
    assert response.headers["x-llaisys-ignored-fields"] == "color"
    assert (await client.post(URL, json={"input": "Hi", "model": "other"})).status_code == 404


@pytest.mark.parametrize(
    ("given", "add", "continues"),
    [
        ({}, False, False),
        ({"add_generation_prompt": True}, True, False),
        ({"continue_final_message": True}, False, True),
    ],
)
async def test_messages_are_rendered_by_the_chat_template(
    client: httpx.AsyncClient, engine: FakeService, given: dict[str, Any], add: bool, continues: bool
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "chat_template_kwargs": {"style": "plain"}, **given}
    response = await client.post(URL, json=body)
    assert [each["embedding"] for each in response.json()["data"]] == [[1, 2, 3]]
    ((rendered, options),) = engine.chats
    assert rendered == messages
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (add, continues)
    assert options["template_kwargs"] == {"style": "plain"}
