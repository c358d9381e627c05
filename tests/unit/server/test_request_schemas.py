"""Bodies of wrong types: every list and object has a bound, and validation stops at the first error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp

from fakes.service import FakeService
from llaisys.body import OTHER_VALUES_MAX, VALUES_MAX, read_body
from llaisys.config import Config
from llaisys.registry import ModelRegistry
from llaisys.sampling_params import ALLOWED_IDS_MAX, BAD_WORDS_MAX, STOP_IDS_MAX, STOP_STRINGS_MAX
from llaisys.server.http_errors import MESSAGE_CHARS_MAX
from llaisys.server.protocol import INLINE_BYTES_MAX, BodyRoute
from llaisys.server.request_schemas import (
    FIELDS_MAX,
    LOGIT_BIAS_MAX,
    MESSAGES_MAX,
    TOOLS_MAX,
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from llaisys.server.state import ServerState

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    "/detokenize": {},
}
JSON = {"content-type": "application/json"}
# Invalid items of one field: enough for a body that is validated off the event loop.
N_WRONG = 40_000


def models_of(routes: list[APIRoute]) -> set[type[BaseModel]]:
    return {r.body_field.field_info.annotation for r in routes if r.body_field is not None}  # type: ignore[misc]


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every part of a core schema that validates a value."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for name, value in schema.items():
            if name not in ("metadata", "serialization"):
                yield from schemas(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from schemas(value)


def unbounded(model: type[BaseModel]) -> list[str]:
    """Return the unbounded parts of a model, by kind."""
    found = []
    for schema in schemas(model.__pydantic_core_schema__):
        match schema["type"]:
            case "list" if "max_length" not in schema or not schema.get("fail_fast"):
                found.append("list")
            case "dict" if "max_length" not in schema:
                found.append("dict")
            case "set" | "frozenset" | "tuple" | "generator" | "iterable" | "mapping":
                found.append(schema["type"])
            case "model" if not issubclass(schema["cls"], Body):
                found.append(schema["cls"].__name__)
    return found


def test_every_list_and_object_of_every_route_has_a_bound(routes: list[APIRoute]) -> None:
    models = models_of(routes)
    assert {ChatCompletionRequest, CompletionRequest, DetokenizeRequest} <= models
    assert len(models) >= 11
    assert {model.__name__: unbounded(model) for model in models if unbounded(model)} == {}
    assert all(isinstance(r, BodyRoute) for r in routes if r.body_field is not None)


def test_a_model_without_a_bound_is_found() -> None:
    class Inner(BaseModel):
        pass

    class Careless(Body):
        a: list[int]
        b: dict[str, int] | None
        c: Inner
        d: tuple[int, ...]

    assert sorted(unbounded(Careless)) == ["Inner", "dict", "list", "tuple"]


WRONG = [
    (CHAT, "messages", [1], MESSAGES_MAX),
    (CHAT, "tools", [1], TOOLS_MAX),
    (CHAT, "stop", [1], STOP_STRINGS_MAX),
    (CHAT, "stop_token_ids", ["a"], STOP_IDS_MAX),
    (CHAT, "bad_words", [1], BAD_WORDS_MAX),
    (CHAT, "guided_choice", [1], 1 << 14),
    (CHAT, "logit_bias", {}, LOGIT_BIAS_MAX),
    (CHAT, "response_format", {}, FIELDS_MAX),
    (CHAT, "guided_json", {}, FIELDS_MAX),
    (CHAT, "tool_choice", {}, FIELDS_MAX),
    (CHAT, "chat_template_kwargs", {}, FIELDS_MAX),
    (CHAT, "stream_options", {}, FIELDS_MAX),
]


@pytest.mark.parametrize(("url", "field", "items", "most"), WRONG)
async def test_too_many_items_are_rejected_without_validating_them(
    engine: FakeService, client: httpx.AsyncClient, url: str, field: str, items: Any, most: int
) -> None:
    value = items * N_WRONG if items else {f"k{i}": "x" for i in range(N_WRONG)}
    for n, sent in ((len(value), value), (most + 1, shortened(value, most + 1))):
        response = await client.post(url, json={**BASES[url], field: sent})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
        assert error["message"] == f"{field} has {n} entries, at most {most}"
    assert not engine.calls


def shortened(value: Any, n: int) -> Any:
    return value[:n] if isinstance(value, list) else dict(list(value.items())[:n])


async def test_the_first_invalid_item_is_named(client: httpx.AsyncClient) -> None:
    for url, fields, param in (
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}] * 3 + [5]}, "messages[3]"),
        (CHAT, {"tools": [{}, 5]}, "tools[1]"),
        (CHAT, {"messages": [{f"k{i}": 1 for i in range(FIELDS_MAX + 1)}]}, "messages[0]"),
        (CHAT, {"guided_json": 5}, "guided_json"),
        (CHAT, {"tool_choice": 5}, "tool_choice"),
        (CHAT, {"logit_bias": {"k" * 1000: "x"}}, f"logit_bias.{'k' * 64}"),
        ("/detokenize", {"tokens": [1] * N_WRONG + ["x"]}, f"tokens[{N_WRONG}]"),
        ("/detokenize", {"tokens": ["x"] * N_WRONG}, "tokens[0]"),
        (COMPLETIONS, {"allowed_token_ids": ["x"] * N_WRONG}, "allowed_token_ids[0]"),
        (COMPLETIONS, {"allowed_token_ids": [1] * (ALLOWED_IDS_MAX + 1)}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": [{}] * 2000}, "prompt"),
    ):
        response = await client.post(url, json={**BASES[url], **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert len(response.content) < MESSAGE_CHARS_MAX + 500


@pytest.mark.parametrize("n_fields", [FIELDS_MAX, FIELDS_MAX + 1])
async def test_the_number_of_fields_is_bounded(
    client: httpx.AsyncClient, chat_body: dict[str, Any], n_fields: int
) -> None:
    more = {f"field{i}": 1 for i in range(n_fields - len(chat_body))}
    response = await client.post(CHAT, json={**chat_body, **more})
    if n_fields <= FIELDS_MAX:
        assert response.status_code == 200
    else:
        assert response.json()["error"]["message"] == f"The body has {n_fields} entries, at most {FIELDS_MAX}"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatCompletionRequest, {"messages": [1] * MESSAGES_MAX}),
        (ChatCompletionRequest, {"messages": [], "stop": [1] * STOP_STRINGS_MAX}),
        (CompletionRequest, {"prompt": "", "guided_choice": [1] * 1000}),
        (DetokenizeRequest, {"tokens": ["x"] * 1000}),
    ],
)
def test_validation_stops_at_the_first_error(model: type[BaseModel], body: dict[str, Any]) -> None:
    """A field of several types has one error per type."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 2


@pytest.mark.parametrize("n_over", [0, 1])
async def test_large_bodies_are_validated_off_the_event_loop(
    engine: FakeService, make_client: Any, monkeypatch: pytest.MonkeyPatch, n_over: int
) -> None:
    registry = ModelRegistry([engine])  # type: ignore[list-item]  # the fake has AsyncLLM's surface
    models = []

    async def read(raw: bytes, model: str | None) -> Any:
        models.append(model)
        return read_body(raw, model)

    monkeypatch.setattr(registry, "read_body", read)
    raw = b'{"prompt": ["a", 5]'
    raw += b" " * (INLINE_BYTES_MAX + n_over - len(raw) - 1) + b"}"
    async with make_client(ServerState(Config(), models=registry)) as client:
        response = await client.post(COMPLETIONS, content=raw, headers=JSON)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt[1]")
        response = await client.post(COMPLETIONS, content=raw.replace(b"prompt", b"prumpt"), headers=JSON)
        assert response.json()["error"]["code"] == "missing_required_parameter"
    assert models == ["llaisys.server.request_schemas:CompletionRequest"] * 2 * n_over


def test_the_bound_of_a_field_is_reported_before_that_of_the_body() -> None:
    raw = json.dumps({"messages": [], "stop": [1] * (OTHER_VALUES_MAX + 1)}).encode()
    _, invalid = read_body(raw, "llaisys.server.request_schemas:ChatCompletionRequest")
    assert invalid is not None
    assert invalid[2] == f"has {OTHER_VALUES_MAX + 1} entries, at most {STOP_STRINGS_MAX}"


@pytest.mark.parametrize("field", ["prompt", "x"])
def test_token_ids_and_other_values_have_their_own_bounds(field: str) -> None:
    """Token ids have one bound, all other values another."""
    most = VALUES_MAX if field == "prompt" else OTHER_VALUES_MAX
    raw = json.dumps({field: [1] * most})
    assert read_body(raw.encode(), None)[1] is None
    with pytest.raises(Exception, match=f"{field} makes the body exceed"):
        read_body(raw.replace("[1", "[1, 1").encode(), None)


def test_a_tokenizer_worker_does_not_import_the_server(routes: list[APIRoute]) -> None:
    modules = ", ".join({model.__module__ for model in models_of(routes)})
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"fastapi", "starlette", "numpy", "llaisys.engine", "llaisys._core"} & set(loaded.split())


async def test_a_value_in_an_error_message_is_truncated(client: httpx.AsyncClient) -> None:
    for fields in (
        {"request_id": "x" * 50_000},
        {"encoding_format": "x" * 50_000},
        {"seed": 10**4000},
        {"response_format": {"type": "x" * 50_000}},
    ):
        response = await client.post(CHAT, json={**BASES[CHAT], **fields})
        assert response.status_code == (200 if "encoding_format" in fields else 400)
        assert len(response.content) < MESSAGE_CHARS_MAX + 500


async def test_the_openapi_document_states_the_bounds(app: ASGIApp) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        parts = (await client.get("/openapi.json")).json()["components"]["schemas"]
    chat = parts["ChatCompletionRequest"]
    assert chat["maxProperties"] == FIELDS_MAX
    assert chat["properties"]["messages"]["maxItems"] == MESSAGES_MAX
    assert parts["DetokenizeRequest"]["properties"]["tokens"]["maxItems"] == VALUES_MAX
