"""Ollama's API on a scripted engine: translation of requests, objects of responses, errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from ollama import _types as types

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import ContextLengthError, EngineDeadError, RejectedError
from llaisys.registry import ModelRegistry
from llaisys.server.ollama.input import NEUTRAL, NO_EFFECT
from llaisys.server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from llaisys.server.routes.ollama_models import OLLAMA_VERSION
from llaisys.server.state import ServerState

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


async def chat(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    return await client.post("/api/chat", json={"model": "tiny", "messages": MESSAGES, **more})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat_is_streamed_by_default_and_the_last_line_has_the_counts(
    client: httpx.AsyncClient,
) -> None:
    made = lines(await chat(client))
    assert [each["message"] for each in made] == [
        {"role": "assistant", "content": "Hello"},
        {"role": "assistant", "content": "!"},
        {"role": "assistant", "content": ""},
    ]
    assert [each["done"] for each in made] == [False, False, True]
    assert {each["model"] for each in made} == {"tiny"}
    last = types.ChatResponse(**made[-1])
    assert (last.done_reason, last.prompt_eval_count, last.eval_count) == ("stop", 3, 3)
    assert last.total_duration is not None
    assert last.total_duration >= (last.prompt_eval_duration or 0) + (last.eval_duration or 0) > 0
    assert last.load_duration == 0


async def test_an_unstreamed_chat_is_one_object(client: httpx.AsyncClient) -> None:
    response = await chat(client, stream=False)
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["message"] == {"role": "assistant", "content": "Hello!"}
    assert (body["done"], body["done_reason"], body["eval_count"]) == (True, "stop", 3)
    types.ChatResponse(**body)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("path", ["chat", "generate", "show", "embed"])
async def test_the_body_is_json_whatever_its_content_type(
    client: httpx.AsyncClient, path: str, kind: str | None
) -> None:
    """LiteLLM sends no content type, and curl without `-H` that of a form."""
    said = {"messages": [{"role": "user", "content": "Hi"}]} if path == "chat" else {"prompt": "Hi"}
    content = json.dumps({"model": "tiny", "input": "Hi", "stream": False, **said}).encode()
    headers = {} if kind is None else {"content-type": kind}
    response = await client.post(f"/api/{path}", content=content, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "alias/of-tiny", "alias/of-tiny:latest"])
async def test_names_have_ollamas_tag_or_none(client: httpx.AsyncClient, name: str) -> None:
    response = await chat(client, model=name, stream=False)
    assert response.json()["model"] == name


async def test_options_become_sampling_parameters(client: httpx.AsyncClient, engine: FakeService) -> None:
    options = {
        "num_predict": 5,
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "typical_p": 0.75,
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 9,
        "stop": ["\n"],
        # Without effect.
        "num_ctx": 8192,
        "num_gpu": 99,
        "mirostat": 0,
    }
    assert (await chat(client, options=options, keep_alive="5m")).status_code == 200
    params = engine.calls[0].params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.25, 7, 0.5)
    assert (params.min_p, params.typical_p, params.repetition_penalty) == (0.125, 0.75, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (0.5, 0.25, 9)
    assert tuple(params.stop) == ("\n",)


@pytest.mark.parametrize("n_predict", [-1, -2])
async def test_a_negative_num_predict_is_no_limit(
    client: httpx.AsyncClient, engine: FakeService, n_predict: int
) -> None:
    await chat(client, options={"num_predict": n_predict, "seed": -1})
    assert engine.calls[0].params.max_tokens is None
    assert engine.calls[0].params.seed is None


async def test_messages_have_the_names_of_templates(client: httpx.AsyncClient, engine: FakeService) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    said = [
        *MESSAGES,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_name": "weather", "images": []},
    ]
    assert (await chat(client, messages=said, think=False)).status_code == 200
    messages, options = engine.chats[0]
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
        "reasoning_content": "hm",
    }
    assert messages[2] == {"role": "tool", "content": "rain", "name": "weather"}
    assert options["template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_tool_calls(client: httpx.AsyncClient, engine: FakeService, stream: bool) -> None:
    engine.config = Config(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="deepseek_r1"
    )
    engine.script = [Piece(["hm</think>", "It rains. ", CALL], "stop")]
    response = await chat(client, tools=[TOOL], think="high", stream=stream)
    messages = [each["message"] for each in lines(response)] if stream else [response.json()["message"]]
    assert "".join(each.get("thinking", "") for each in messages) == "hm"
    assert "".join(each["content"] for each in messages) == "It rains."
    (calls,) = [each["tool_calls"] for each in messages if "tool_calls" in each]
    assert calls == [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    for message in messages:
        types.Message(**message)
    assert engine.chats[0][1]["template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_ollamas_form(client: httpx.AsyncClient, stream: bool) -> None:
    response = await chat(client, logprobs=True, top_logprobs=2, stream=stream)
    made = lines(response) if stream else [response.json()]
    tokens = [token for each in made for token in types.ChatResponse(**each).logprobs or ()]
    assert [token.token for token in tokens] == ["Hel", "lo", "!"]
    assert all(len(token.top_logprobs or ()) == 2 for token in tokens)


async def test_format_is_a_grammar(client: httpx.AsyncClient, engine: FakeService) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await chat(client, format=schema)
    await chat(client, format="json")
    await chat(client, format="")
    specs = [call.params.structured_outputs for call in engine.calls]
    assert specs[0] is not None
    assert json.loads(str(specs[0].json)) == schema
    assert specs[1] is not None
    assert specs[1].json_object
    assert specs[2] is None


async def test_generate_renders_a_user_message(client: httpx.AsyncClient, engine: FakeService) -> None:
    body = {"model": "tiny", "prompt": "Hi", "system": "Be kind"}
    made = lines(await client.post("/api/generate", json=body))
    assert [each["response"] for each in made] == ["Hello", "!", ""]
    assert engine.chats[0][0] == [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hi"},
    ]
    whole = (await client.post("/api/generate", json={**body, "stream": False})).json()
    assert (whole["response"], whole["done_reason"]) == ("Hello!", "stop")
    types.GenerateResponse(**whole)


async def test_generate_raw_uses_the_prompt_itself(client: httpx.AsyncClient, engine: FakeService) -> None:
    await client.post("/api/generate", json={"model": "tiny", "prompt": "Hi", "raw": True})
    assert engine.chats == []
    assert engine.calls[0].prompt == list(b"Hi")


@pytest.mark.parametrize(
    ("path", "empty"),
    [("/api/chat", {"message": {"role": "assistant", "content": ""}}), ("/api/generate", {"response": ""})],
)
async def test_a_request_without_a_prompt_loads_the_model(
    client: httpx.AsyncClient, engine: FakeService, path: str, empty: dict[str, Any]
) -> None:
    engine.loaded = False
    body = (await client.post(path, json={"model": "tiny", "keep_alive": -1})).json()
    del body["created_at"]
    assert body == {"model": "tiny", **empty, "done": True, "done_reason": "load"}
    assert engine.loaded
    assert engine.calls == []


async def test_a_model_that_cannot_be_loaded_is_the_servers_error(
    client: httpx.AsyncClient, engine: FakeService
) -> None:
    engine.load_error = RejectedError("no weights", param="model")
    response = await client.post("/api/generate", json={"model": "tiny"})
    assert response.status_code == 503


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        ({"options": {"presence_penalty": 1, "repeat_last_n": 0}}, "options.repeat_last_n"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"temperature": "warm"}}, "options.temperature"),
        ({"format": "xml"}, "format"),
        ({"think": True}, "think"),
        ({"think": "much"}, "think"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": 5}, "messages"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"images": ["aGk="]}, "images"),
    ],
)
async def test_a_field_that_is_not_supported_is_named(
    client: httpx.AsyncClient, more: dict[str, Any], named: str
) -> None:
    response = await chat(client, **more)
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    assert named in response.json()["error"]


async def test_unknown_fields_are_named_in_a_header(client: httpx.AsyncClient) -> None:
    response = await chat(client, colour=1, options={"tone": 1, "num_ctx": 4096})
    assert response.headers["x-llaisys-ignored-fields"] == "colour,options.tone"


async def test_an_unknown_model_is_a_404_in_ollamas_form(client: httpx.AsyncClient) -> None:
    response = await chat(client, model="other")
    assert response.status_code == 404
    assert response.json() == {"error": "The model `other` does not exist."}


async def test_a_later_error_is_the_last_line(client: httpx.AsyncClient, engine: FakeService) -> None:
    engine.script = [Piece(["Hel"]), EngineDeadError("gone")]
    made = lines(await chat(client))
    assert made[0]["message"]["content"] == "Hel"
    assert made[-1].keys() == {"error"}
    assert len(made) == 2


async def test_embeddings(client: httpx.AsyncClient) -> None:
    body = (await client.post("/api/embed", json={"model": "tiny:latest", "input": ["Hi", "i"]})).json()
    assert body["embeddings"] == [[72, 105], [105]]
    assert (body["model"], body["prompt_eval_count"]) == ("tiny:latest", 3)
    types.EmbedResponse(**body)
    one = (await client.post("/api/embeddings", json={"model": "tiny", "prompt": "Hi"})).json()
    assert one == {"embedding": [72, 105]}


async def test_a_long_input_is_cut_unless_the_request_says_no(
    client: httpx.AsyncClient, engine: FakeService
) -> None:
    body = {"model": "tiny", "input": "x" * 100}
    assert len((await client.post("/api/embed", json=body)).json()["embeddings"][0]) == engine.max_model_len
    engine.embedding_error = ContextLengthError("the prompt has 101 tokens", param="prompt")
    response = await client.post("/api/embed", json={**body, "truncate": False})
    assert response.status_code == 400
    assert response.json() == {"error": "the input has 101 tokens"}


async def test_the_models_are_listed_and_described(client: httpx.AsyncClient, engine: FakeService) -> None:
    listed = types.ListResponse(**(await client.get("/api/tags")).json())
    assert [model.model for model in listed.models] == ["tiny", "alias/of-tiny"]
    assert listed.models[0].size == engine.model_info.weight_bytes
    assert listed.models[0].digest == listed.models[1].digest
    loaded = types.ProcessResponse(**(await client.get("/api/ps")).json())
    assert [model.context_length for model in loaded.models] == [64, 64]
    shown = types.ShowResponse(**(await client.post("/api/show", json={"model": "tiny"})).json())
    assert shown.capabilities == ["completion", "embedding"]
    assert shown.template == ""
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 64
    engine.loaded = False
    assert (await client.get("/api/ps")).json() == {"models": []}
    assert (await client.get("/api/version")).json() == {"version": OLLAMA_VERSION}


async def test_the_capabilities_are_those_of_the_parsers(
    client: httpx.AsyncClient, engine: FakeService
) -> None:
    engine.config = Config(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    shown = (await client.post("/api/show", json={"name": "tiny"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]


async def test_a_key_is_needed(make_client: Callable[..., httpx.AsyncClient], engine: FakeService) -> None:
    state = ServerState(Config(api_key=("secret",)), models=ModelRegistry([engine]))  # type: ignore[list-item]  # as in conftest
    async with make_client(state) as client:
        response = await client.get("/api/tags")
    assert response.status_code == 401
    assert response.json().keys() == {"error"}


def test_every_field_of_the_client_is_known() -> None:
    """Every field that Ollama's client can send is typed, neutral or without effect."""
    known = NEUTRAL.keys() | NO_EFFECT
    # Its fields for image generation, which no model here can do, are named as unknown.
    of_images = {"width", "height", "steps"}
    pairs: list[tuple[type[Any], Mapping[str, Any], str]] = [
        (OllamaChatRequest, types.ChatRequest.model_fields, ""),
        (OllamaGenerateRequest, types.GenerateRequest.model_fields, ""),
        (OllamaOptions, types.Options.model_fields, "options."),
    ]
    for ours, theirs, prefix in pairs:
        missing = {
            name for name in theirs if name not in ours.model_fields and f"{prefix}{name}" not in known
        }
        assert missing <= of_images
