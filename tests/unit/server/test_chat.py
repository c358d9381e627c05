"""POST /v1/chat/completions on a scripted engine: response shapes, and exact bytes of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
)
from llaisys.registry import ModelRegistry
from llaisys.server.state import ServerState
from sse import chunks, events

URL = "/v1/chat/completions"
HEAD = ("id", "object", "created", "model", "system_fingerprint")


async def stream_of(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post(URL, json={**body, "stream": True})


async def test_an_unstreamed_chat_has_the_openai_fields(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    response = await client.post(URL, json=chat_body)
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    nulls = ("prompt_logprobs", "prompt_token_ids", "service_tier", "kv_transfer_params", "metrics")
    assert [body[name] for name in nulls] == [None] * 5
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_streamed_chat_has_the_openai_frames(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    response = await stream_of(client, chat_body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    found = chunks(response.content)
    head = {name: found[0][name] for name in HEAD}
    assert all({name: chunk[name] for name in HEAD} == head for chunk in found)
    raw_head = json.dumps(head, separators=(",", ":"))[1:-1]

    def frame(delta: str, finish: str) -> str:
        return (
            f'data: {{{raw_head},"choices":[{{"index":0,"delta":{delta},"logprobs":null,'
            f'"finish_reason":{finish},"stop_reason":null}}]}}\n\n'
        )

    expected = [
        frame('{"role":"assistant","content":""}', "null"),
        frame('{"content":"Hello"}', "null"),
        frame('{"content":"!"}', "null"),
        frame("{}", '"stop"'),
        "data: [DONE]\n\n",
    ]
    assert response.content.decode() == "".join(expected)


async def test_usage_chunk_has_no_choices(client: httpx.AsyncClient, chat_body: dict[str, Any]) -> None:
    response = await stream_of(client, {**chat_body, "stream_options": {"include_usage": True}})
    *others, last = chunks(response.content)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in others)


async def test_usage_in_every_chunk(client: httpx.AsyncClient, chat_body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await stream_of(client, {**chat_body, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks(response.content)] == [0, 2, 3, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks(response.content)} == {3}


async def test_stream_options_need_a_stream(client: httpx.AsyncClient, chat_body: dict[str, Any]) -> None:
    response = await client.post(URL, json={**chat_body, "stream_options": {"include_usage": True}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


async def test_chat_logprobs_have_the_openai_shape(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    body = {**chat_body, "logprobs": True, "top_logprobs": 3}
    content = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hel", "lo", "!"]
    assert content[0] == {
        "token": "Hel",
        "logprob": -1.0,
        "bytes": [72, 101, 108],
        "top_logprobs": [
            {"token": "best", "logprob": -0.5, "bytes": [98, 101, 115, 116]},
            {"token": "Hel", "logprob": -1.0, "bytes": [72, 101, 108]},
            {"token": "never", "logprob": -9999.0, "bytes": [110, 101, 118, 101, 114]},
        ],
    }
    streamed = chunks((await stream_of(client, body)).content)
    joined = [
        entry for chunk in streamed for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert joined == content


async def test_logprobs_of_only_the_sampled_token(
    client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    response = await client.post(URL, json={**chat_body, "logprobs": True})
    assert [entry["top_logprobs"] for entry in response.json()["choices"][0]["logprobs"]["content"]] == [
        [],
        [],
        [],
    ]


async def test_a_partial_character_has_no_bytes(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    engine.script = [Piece(["\ufffd"], "length")]
    response = await client.post(URL, json={**chat_body, "logprobs": True})
    assert response.json()["choices"][0]["logprobs"]["content"][0]["bytes"] is None


async def test_stream_equals_the_whole_response(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    engine.script = [Piece(["天", "\n"]), Piece(), Piece(["🙂"]), Piece([], "length", 7)]
    whole = (await client.post(URL, json=chat_body)).json()["choices"][0]
    streamed = [chunk["choices"][0] for chunk in chunks((await stream_of(client, chat_body)).content)]
    assert (
        "".join(choice["delta"].get("content", "") for choice in streamed)
        == whole["message"]["content"]
        == "天\n🙂"
    )
    assert streamed[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert streamed[-1]["stop_reason"] == whole["stop_reason"] == 7


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (ContextLengthError("too long: 90 > 64", param="messages"), 400, "context_length_exceeded", {}),
        (QueueFullError("full", retry_after_s=1), 429, "server_overloaded", {"retry-after": "1"}),
        (RequestTimeoutError("600 s"), 408, "request_timeout", {"x-should-retry": "false"}),
        (RequestFailedError("row"), 500, "request_failed", {"x-should-retry": "false"}),
        (EngineDeadError("gone"), 503, "engine_dead", {"retry-after": "1"}),
        (KeyError("a bug"), 500, "internal_error", {"x-should-retry": "false"}),
    ],
)
async def test_an_error_before_the_first_token_is_a_json_response(
    engine: FakeService,
    client: httpx.AsyncClient,
    chat_body: dict[str, Any],
    error: Exception,
    status: int,
    code: str,
    headers: dict[str, str],
) -> None:
    engine.script = [error]
    for response in (await client.post(URL, json=chat_body), await stream_of(client, chat_body)):
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        body = response.json()["error"]
        assert set(body) == {"message", "type", "param", "code"}
        assert body["code"] == code
        assert {name: response.headers[name] for name in headers} == headers
        assert "a bug" not in response.text


async def test_an_error_in_a_stream_is_a_frame_followed_by_done(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    engine.script = [Piece(["Hel"]), RequestTimeoutError("600 s")]
    found = events((await stream_of(client, chat_body)).content)
    assert [event if event == "[DONE]" else next(iter(event)) for event in found] == [
        "id",
        "id",
        "error",
        "[DONE]",
    ]
    assert found[2]["error"]["code"] == "request_timeout"
    assert (await client.post(URL, json=chat_body)).status_code == 408


@pytest.mark.parametrize("end", [RequestTimeoutError("600 s"), Piece([], "timeout")])
async def test_a_timeout_has_the_configured_status(
    engine: FakeService,
    make_client: Callable[..., httpx.AsyncClient],
    chat_body: dict[str, Any],
    end: Exception | Piece,
) -> None:
    """Routers repeat a request that got 408, but not one that got 499."""
    engine.script = [end]
    config = Config(request_timeout_status=499)
    state = ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]  # as in conftest
    async with make_client(state) as client:
        for response in (await client.post(URL, json=chat_body), await stream_of(client, chat_body)):
            assert response.status_code == 499
            assert response.json()["error"]["code"] == "request_timeout"
            assert response.headers["x-should-retry"] == "false"


async def test_an_aborted_request_is_an_error(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    engine.script = [Piece(["Hel"]), Piece([], "abort")]
    assert (await client.post(URL, json=chat_body)).json()["error"]["code"] == "cancelled"
    assert events((await stream_of(client, chat_body)).content)[-2]["error"]["code"] == "cancelled"


async def test_the_conversation_reaches_the_template(engine: FakeService, client: httpx.AsyncClient) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    await client.post(URL, json={"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
    (sent, options) = engine.chats[0]
    assert sent[0] == messages[0]
    assert sent[1] == {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert options == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "add_special_tokens": False,
        "template_kwargs": {"enable_thinking": False},
        "n_tokens_max": engine.max_model_len,
    }


async def test_the_reasoning_effort_is_a_variable_of_the_template(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    for effort, given, want in (
        ("high", {}, {"reasoning_effort": "high"}),
        ("none", {}, {"reasoning_effort": "none", "enable_thinking": False}),
        ("low", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    ):
        await client.post(URL, json={**chat_body, "reasoning_effort": effort, "chat_template_kwargs": given})
        assert engine.chats[-1][1]["template_kwargs"] == want


async def test_reasoning_and_tools_have_what_a_template_of_channels_reads(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    messages = [said, {**said, "content": "I look."}]
    tools = [{"type": "function", "function": {"name": "now"}}]
    for parser, has_thinking in (("qwen3", [False, False]), ("openai_gptoss", [True, False])):
        engine.config = Config(reasoning_parser=parser, tool_call_parser="hermes")
        assert (await client.post(URL, json={"messages": messages, "tools": tools})).status_code == 200
        sent, options = engine.chats[-1]
        assert ["thinking" in message for message in sent] == has_thinking
        assert ("description" in options["tools"][0]["function"]) == has_thinking[0]


async def test_a_prompt_to_be_truncated_may_have_any_length(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    await client.post(URL, json={**chat_body, "truncate_prompt_tokens": 2})
    assert engine.chats[0][1]["n_tokens_max"] is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"add_generation_prompt": False, "continue_final_message": True}, (False, True)),
    ],
)
async def test_the_end_of_the_prompt(
    engine: FakeService,
    client: httpx.AsyncClient,
    chat_body: dict[str, Any],
    fields: dict[str, bool],
    expected: tuple[bool, bool],
) -> None:
    await client.post(URL, json={**chat_body, **fields})
    options = engine.chats[0][1]
    assert (options["add_generation_prompt"], options["continue_final_message"]) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
    ],
)
async def test_reserved_template_arguments_are_rejected(
    client: httpx.AsyncClient, chat_body: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    response = await client.post(URL, json={**chat_body, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_chat_runs_to_the_end_of_the_context(
    engine: FakeService, client: httpx.AsyncClient, chat_body: dict[str, Any]
) -> None:
    await client.post(URL, json=chat_body)
    await client.post(URL, json={**chat_body, "max_tokens": 5})
    await client.post(URL, json={**chat_body, "max_tokens": 5, "max_completion_tokens": 6})
    assert [call.params.max_tokens for call in engine.calls] == [None, 5, 6]
