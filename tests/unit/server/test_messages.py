"""POST /v1/messages on a scripted engine: the order of events, objects, errors and limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RejectedError,
    RequestFailedError,
    RequestTimeoutError,
)
from llaisys.registry import ModelRegistry
from llaisys.server.middleware.auth import Keyring
from llaisys.server.routes.messages import MESSAGE_EVENTS
from llaisys.server.state import ServerState
from llaisys.server.stream_writer import StreamWriter
from sse import named_events

URL = "/v1/messages"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"name": "add", "description": "Add", "input_schema": {"type": "object", "properties": {}}}
ANY = {"tools": [TOOL], "tool_choice": {"type": "any"}}
R1 = Config(reasoning_parser="deepseek_r1")


@pytest.fixture
def body() -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}


async def stream_of(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(URL, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.content)


def script(*texts: str, finish: str = "stop", stop_reason: int | str | None = None) -> list[Piece]:
    """Return a script of one token per text, then the end."""
    return [*(Piece([text]) for text in texts), Piece([], finish, stop_reason)]


def kinds(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of events, with the type of the block or delta."""
    return [
        " ".join(
            [event["type"].removeprefix("content_block_")]
            + [event[name]["type"] for name in ("content_block", "delta") if "type" in event.get(name, {})]
        )
        for event in found
    ]


async def test_a_message_has_the_fields_of_anthropic(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    response = await client.post(URL, json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]
    message = response.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 3,
        },
    }


async def test_a_stream_has_the_events_of_anthropic(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    found = await stream_of(client, body)
    start, *blocks, delta, stop = found
    usage = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1}
    message = start["message"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": message["usage"]["output_tokens"]},
    }
    assert blocks == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "!"}},
        {"type": "content_block_stop", "index": 0},
    ]
    assert delta == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {**usage, "output_tokens": 3},
    }
    assert stop == {"type": "message_stop"}


async def test_blocks_of_reasoning_text_and_calls_follow_each_other(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    engine.config = Config(
        reasoning_parser="deepseek_r1", enable_auto_tool_choice=True, tool_call_parser="hermes"
    )
    engine.script = script("I th", "ink.</think>", "So: ", CALL, "\n", CALL, "done")
    found = await stream_of(client, {**body, "tools": [TOOL]})
    assert kinds(found) == [
        "message_start",
        "start thinking",
        "delta thinking_delta",
        "delta thinking_delta",
        "delta signature_delta",
        "stop",
        "start text",
        "delta text_delta",
        "stop",
        *["start tool_use", "delta input_json_delta", "stop"] * 2,
        "start text",
        "delta text_delta",
        "stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in found if event["type"] == "content_block_start"] == [0, 1, 2, 3, 4]
    message = (await client.post(URL, json={**body, "tools": [TOOL]})).json()
    first, second = (block.pop("id") for block in message["content"] if block["type"] == "tool_use")
    assert first.startswith("toolu_")
    assert first != second
    call = {"type": "tool_use", "name": "add", "input": {"a": 1}}
    assert message["content"] == [
        {"type": "thinking", "thinking": "I think.", "signature": ""},
        {"type": "text", "text": "So:"},
        call,
        call,
        {"type": "text", "text": "done"},
    ]
    assert message["stop_reason"] == found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_omitted_thinking_is_an_empty_block(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    engine.config = R1
    engine.script = script("secret</think>", "Yes")
    asked = {**body, "thinking": {"type": "adaptive", "display": "omitted"}}
    assert (await client.post(URL, json=asked)).json()["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Yes"},
    ]
    assert kinds(await stream_of(client, asked))[1:4] == ["start thinking", "delta signature_delta", "stop"]


@pytest.mark.parametrize(
    ("pieces", "fields", "reason", "sequence"),
    [
        (script("Hi", stop_reason=7), {}, "end_turn", None),
        (script("Hi", stop_reason="END"), {"stop_sequences": ["END"]}, "stop_sequence", "END"),
        (script("Hi", finish="length"), {}, "max_tokens", None),
        (script("Hi", finish="length"), {"max_tokens": 61}, "max_tokens", None),
        (script("Hi", finish="length"), {"max_tokens": 62}, "model_context_window_exceeded", None),
        (script(CALL), ANY, "tool_use", None),
        (script(CALL, finish="length"), ANY, "max_tokens", None),
        ([Piece([], "stop")], {}, "end_turn", None),
    ],
)
async def test_stop_reasons(
    engine: FakeService,
    client: httpx.AsyncClient,
    body: dict[str, Any],
    pieces: list[Piece],
    fields: dict[str, Any],
    reason: str,
    sequence: str | None,
) -> None:
    engine.script = pieces
    want = {"stop_reason": reason, "stop_sequence": sequence}
    message = (await client.post(URL, json={**body, **fields})).json()
    assert {name: message[name] for name in want} == want
    assert (await stream_of(client, {**body, **fields}))[-2]["delta"] == want


async def test_max_tokens_is_lowered_to_the_context(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    """Agents request more tokens than a small context has. A prompt of 3 tokens leaves 61 of 64."""
    for asked in (10, 61, 62, 32_000):
        await client.post(URL, json={**body, "max_tokens": asked})
    assert [call.params.max_tokens for call in engine.calls] == [10, 61, 61, 61]
    engine.max_model_len = 3
    await client.post(URL, json=body)
    assert engine.calls[-1].params.max_tokens == 16


async def test_a_context_that_is_small_for_an_agent_is_logged_once(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine.model_names = ("small-for-agents",)
    del body["model"]
    for fields in ({}, ANY, ANY):
        assert (await client.post(URL, json={**body, **fields})).status_code == 200
    (record,) = [each for each in caplog.records if "small-for-agents" in each.getMessage()]
    assert "context of 64 tokens; coding agents need at least 32768" in record.getMessage()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("full"), 429, "rate_limit_error"),
        (ContextLengthError("72 tokens, the context is 64"), 400, "invalid_request_error"),
        (EngineDeadError("gone"), 529, "overloaded_error"),
        (RequestTimeoutError("late"), 408, "timeout_error"),
        (RequestFailedError("broken"), 500, "api_error"),
    ],
)
async def test_an_error_before_the_first_token_has_a_status(
    engine: FakeService,
    client: httpx.AsyncClient,
    body: dict[str, Any],
    error: Exception,
    status: int,
    kind: str,
    stream: bool,
) -> None:
    engine.script = [error]
    response = await client.post(URL, json={**body, "stream": stream})
    assert response.status_code == status
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert answer["error"]["message"].startswith("prompt is too long: ") == (status == 400)


async def test_an_error_in_a_stream_is_its_last_event(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    engine.script = [Piece(["Hel"]), EngineDeadError("gone")]
    found = await stream_of(client, body)
    assert kinds(found) == ["message_start", "start text", "delta text_delta", "error"]
    assert found[-1]["error"]["type"] == "overloaded_error"


async def test_a_silent_stream_has_named_pings() -> None:
    sent: list[bytes] = []
    pinged = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b"ping" in sent[-1]:
            pinged.set()

    writer = StreamWriter(send, MESSAGE_EVENTS, {}, [{"type": "message_start"}], lambda: None, 30.0)
    task = asyncio.create_task(writer.keep_alive(headers_wait_s=0, ping_interval_s=0))
    await pinged.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await writer.finish([{"type": "message_stop"}])
    found = named_events(b"".join(sent))
    assert [found[0], found[1], found[-1]] == [
        {"type": "message_start"},
        {"type": "ping"},
        {"type": "message_stop"},
    ]


async def test_usage_of_a_waiting_stream_has_no_cached_tokens_yet(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    """The cached tokens are known with the first delta, which the start of the message waits for."""
    engine.script = [Piece(), *script("Hi")]
    found = await stream_of(client, body)
    assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 1


async def test_count_tokens_counts_the_prompt_of_the_message(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    asked = {name: value for name, value in body.items() if name != "max_tokens"}
    for fields in ({}, {"tools": [TOOL], "system": "S"}, {"tools": [TOOL], "tool_choice": {"type": "none"}}):
        response = await client.post(f"{URL}/count_tokens", json={**asked, **fields})
        assert (response.status_code, response.json()) == (200, {"input_tokens": 3})
        assert bool(engine.chats[-1][1]["tools"]) == ("system" in fields)
    assert not engine.calls


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_the_client_is_the_same_with_both_headers(
    engine: FakeService, make_client: Any, body: dict[str, Any], name: str
) -> None:
    config = Config(api_key=("one", "two"))
    state = ServerState(config, keys=Keyring.of(config), models=ModelRegistry([engine]))  # type: ignore[list-item]
    value = "Bearer one" if name == "authorization" else "one"
    async with make_client(state, **{name: value}) as client:
        assert (await client.post(URL, json=body)).status_code == 200
        rejected = await client.post(
            URL, json=body, headers={"x-api-key": "two", "authorization": "Bearer one"}
        )
    assert rejected.status_code == 401
    assert rejected.json()["error"]["type"] == "authentication_error"
    assert [call.client_id for call in engine.calls] == [Keyring.of(config).client_of(b"one")]


async def test_a_full_queue_refuses_before_the_body_is_read(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    engine.full = QueueFullError("full")
    response = await client.post(URL, content=b"not JSON")
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "system", "content": "S"}]}, "messages has no turn of the user"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be a string or a list"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] must be an object"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content contains half"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"system": 5}, "system must be a string or a list of content blocks"),
        ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be unique"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema must be an object"),
        ({"tools": [{"name": "add", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be"),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "not in tools"),
        ({"tool_choice": {"type": "required"}, "tools": [TOOL]}, "tool_choice.type is 'required'"),
        ({"thinking": {"type": "maybe"}}, "thinking.type is 'maybe'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}, **ANY}, "exclude each other"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_a_400_names_the_field(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    response = await client.post(
        URL, content=json.dumps({**body, **fields}), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert "function" not in error["message"] or "not in tools" in error["message"]
    assert not engine.calls


async def test_a_rejected_grammar_has_the_name_of_its_field(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    engine.grammar_error = RejectedError("structured_outputs.json is bad", param="structured_outputs.json")
    format = {"type": "json_schema", "schema": {"type": "object"}}
    response = await client.post(URL, json={**body, "output_config": {"effort": "low", "format": format}})
    assert response.json()["error"]["message"] == "output_config.format.schema is bad"


async def test_unknown_fields_are_named(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    accepted = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
    }
    response = await client.post(f"{URL}?beta=true", json={**body, **accepted, "frobnicate": 1})
    assert response.status_code == 200
    assert response.headers["x-llaisys-ignored-fields"] == "frobnicate"
