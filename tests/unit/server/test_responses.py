"""POST /v1/responses on a scripted engine: the response, and the order and content of the events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from openai.types import responses as openai_responses
from pydantic import TypeAdapter

from fakes.service import FakeService, Piece, PieceOrError
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
from llaisys.server.state import ServerState
from sse import named_events

URL = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CONFIG = Config(reasoning_parser="qwen3", enable_auto_tool_choice=True, tool_call_parser="hermes")
EVENT: TypeAdapter[Any] = TypeAdapter(openai_responses.ResponseStreamEvent)


@pytest.fixture
def engine() -> FakeService:
    """Return an engine with parsers of reasoning and tool calls."""
    return FakeService(config=CONFIG)


def of_tokens(*tokens: str, finish: str = "stop") -> Sequence[PieceOrError]:
    """Return a script with one token in each delta."""
    return [*(Piece([token]) for token in tokens[:-1]), Piece([tokens[-1]], finish)]


async def created(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """Return a response that is not streamed, as openai's model reads it."""
    reply = await client.post(URL, json={"input": "Hi", **body})
    assert reply.status_code == 200, reply.text
    openai_responses.Response.model_validate(reply.json())
    made: dict[str, Any] = reply.json()
    return made


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, as openai's models read them, with numbers from 0."""
    reply = await client.post(URL, json={"input": "Hi", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = named_events(reply.content)
    for number, event in enumerate(events):
        assert EVENT.validate_python(event).type == event["type"]
        assert event["sequence_number"] == number
    return events


def types(events: list[dict[str, Any]]) -> list[str]:
    """Return the types without their common prefix; adjacent equal ones count once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name]


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "item_id", "call_id")}
    return value


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


MESSAGE_EVENTS = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


async def test_a_response_has_openais_fields(client: httpx.AsyncClient) -> None:
    body = await created(client, model="tiny", instructions="Be brief.", metadata={"a": "b"})
    assert body["id"].startswith("resp_")
    assert isinstance(body.pop("created_at"), int)
    assert body.pop("completed_at") >= 0
    body.pop("id")
    assert without_ids(body) == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": [message("Hello!")],
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 6,
        },
        "background": False,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }


async def test_a_stream_of_text(client: httpx.AsyncClient) -> None:
    events = await streamed(client)
    assert types(events) == ["created", "in_progress", *MESSAGE_EVENTS, "completed"]
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["id"]) == ("completed", first["id"])
    assert without_ids(last["output"]) == [message("Hello!")]
    assert [e["delta"] for e in events if "delta" in e] == ["Hello", "!"]
    item = last["output"][0]
    assert {e["item_id"] for e in events if "item_id" in e} == {item["id"]}
    assert events[-2]["item"] == item
    assert last["usage"]["total_tokens"] == 6


async def test_a_stream_has_no_done_frame(client: httpx.AsyncClient) -> None:
    reply = await client.post(URL, json={"input": "Hi", "stream": True})
    assert b"[DONE]" not in reply.content


async def test_reasoning_text_and_calls_are_items(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.script = of_tokens("<think>", "Hm", "m.", "</think>", "\n\n", "I ", "add.", CALL, CALL)
    events = await streamed(client, tools=[TOOL])
    assert types(events) == [
        *("created", "in_progress"),
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *MESSAGE_EVENTS,
        *CALL_EVENTS,
        *CALL_EVENTS,
        "completed",
    ]
    response = events[-1]["response"]
    call = {"type": "function_call", "status": "completed", "name": "add", "arguments": '{"a": 1}'}
    assert without_ids(response["output"]) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hmm."}],
        },
        message("I add."),
        call,
        call,
    ]
    indexes = [e["output_index"] for e in events if "output_index" in e]
    assert indexes == sorted(indexes)
    assert set(indexes) == {0, 1, 2, 3}
    ids = [item["id"] for item in response["output"]]
    assert [each.partition("_")[0] for each in ids] == ["rs", "msg", "fc", "fc"]
    assert len(set(ids) | {item["call_id"] for item in response["output"][2:]}) == 6
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == ids[event["output_index"]]
    # The tags and the four tokens between them; not the blank line.
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    whole = await created(client, tools=[TOOL])
    assert without_ids(whole["output"]) == without_ids(response["output"])
    assert whole["usage"] == response["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_a_summary_if_one_is_requested(
    engine: FakeService, client: httpx.AsyncClient, stream: bool
) -> None:
    engine.script = of_tokens("<think>", "Hmm.", "</think>", "Yes")
    options = {"reasoning": {"effort": "low", "summary": "auto"}}
    if stream:
        events = await streamed(client, **options)
        assert types(events)[2:8] == [
            "output_item.added",
            "reasoning_summary_part.added",
            "reasoning_summary_text.delta",
            "reasoning_summary_text.done",
            "reasoning_summary_part.done",
            "output_item.done",
        ]
        body = events[-1]["response"]
    else:
        body = await created(client, **options)
    reasoning = body["output"][0]
    assert (reasoning["summary"], reasoning["content"]) == ([{"type": "summary_text", "text": "Hmm."}], [])
    assert body["reasoning"] == {"effort": "low", "summary": "auto"}


async def test_reasoning_returns_as_encrypted_content(engine: FakeService, client: httpx.AsyncClient) -> None:
    """A client that resends only `encrypted_content`, as Codex does, sends the reasoning to the template."""
    engine.script = of_tokens("<think>", "Hmm.", "</think>", CALL)
    body = await created(client, tools=[TOOL], include=["reasoning.encrypted_content"])
    reasoning, call = body["output"]
    resent = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    await created(client, input=[{"role": "user", "content": "Hi"}, resent, call, output], tools=[TOOL])
    messages, _ = engine.chats[-1]
    assert messages[1]["reasoning_content"] == "Hmm."
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == call["call_id"]
    bad = await client.post(URL, json={"input": [{**resent, "encrypted_content": "gAAA?"}]})
    assert bad.json()["error"]["param"] == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("script", "n"),
    [
        (of_tokens("<think>", "a", "b", "</think>", "c", "d"), 4),
        (of_tokens("<think>", "a", "b"), 3),
        (of_tokens("a", "b", "</think>"), 0),
        (of_tokens("\n", "<thi", "s"), 0),
        (of_tokens("<think>", "a", "</think>", CALL), 3),
        # A delta of several tokens is divided by its characters: 2 of 20 are content.
        ([Piece(["<think>", "abc", "</think>", "de"], "stop")], 4),
        ([Piece(["<think>", "abc"]), Piece(["de", "</think>", "fghijklmno", "p"], "stop")], 4),
    ],
)
async def test_reasoning_tokens(
    engine: FakeService, client: httpx.AsyncClient, script: Sequence[PieceOrError], n: int
) -> None:
    engine.script = script
    body = await created(client, tools=[TOOL])
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == n


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_limit_makes_a_response_incomplete(
    engine: FakeService, client: httpx.AsyncClient, stream: bool
) -> None:
    engine.script = of_tokens("Hel", "lo", finish="length")
    if stream:
        events = await streamed(client, max_output_tokens=2)
        assert types(events)[-1] == "incomplete"
        body = events[-1]["response"]
    else:
        body = await created(client, max_output_tokens=2)
    assert engine.calls[0].params.max_tokens == 2
    assert (body["status"], body["completed_at"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert without_ids(body["output"]) == [message("Hello", "incomplete")]
    assert body["max_output_tokens"] == 2


@pytest.mark.parametrize(
    "body", [{"input": ""}, {"input": []}, {"input": None}, {"input": "", "stream": True}]
)
async def test_an_empty_probe_is_accepted(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    engine.script = [Piece([""], "length")]
    reply = await client.post(URL, json={"max_output_tokens": 1, **body})
    assert reply.status_code == 200
    assert engine.chats[0][0] == [{"role": "user", "content": ""}]
    made = named_events(reply.content)[-1]["response"] if body.get("stream") else reply.json()
    assert without_ids(made["output"]) == [message("", "incomplete")]


async def test_logprobs_belong_to_the_text(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.script = of_tokens("<think>", "Hm", "</think>", "\n", "Yes", "!", "")
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = await streamed(client, **options)
    part = events[-1]["response"]["output"][1]["content"][0]
    assert [each["token"] for each in part["logprobs"]] == ["Yes", "!", ""]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in e["logprobs"]] for e in deltas] == [["Yes"], ["!"]]
    assert part["logprobs"][0]["top_logprobs"][0]["token"] == "best"
    whole = await created(client, **options)
    assert whole["output"][1]["content"][0] == part
    assert (await created(client))["output"][1]["content"][0]["logprobs"] == []


STREAM_ERRORS = [
    (RequestFailedError("boom"), "failed", "server_error"),
    (EngineDeadError("boom"), "failed", "server_error"),
    (RequestTimeoutError("late"), "failed", "server_error"),
    (QueueFullError("full"), "failed", "rate_limit_exceeded"),
    (RejectedError("no token is left", param="prompt"), "failed", "invalid_prompt"),
]


@pytest.mark.parametrize(("error", "status", "code"), STREAM_ERRORS)
async def test_an_error_ends_a_stream_with_response_failed(
    engine: FakeService, client: httpx.AsyncClient, error: Exception, status: str, code: str
) -> None:
    engine.script = [Piece(["Hel"]), error]
    events = await streamed(client)
    assert types(events)[-2:] == ["output_text.delta", "failed"]
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == (status, code)
    assert "internal error" not in response["error"]["message"]


@pytest.mark.parametrize("error", [error for error, _, _ in STREAM_ERRORS])
async def test_an_error_before_the_first_event_is_an_http_error(
    engine: FakeService, client: httpx.AsyncClient, error: Exception
) -> None:
    engine.script = [error]
    streams = [await client.post(URL, json={"input": "Hi", "stream": stream}) for stream in (True, False)]
    first, second = (reply.json()["error"] for reply in streams)
    assert streams[0].status_code == streams[1].status_code >= 400
    assert (first["code"], first["param"]) == (second["code"], second["param"])
    if isinstance(error, RejectedError):
        assert first["param"] == "input"


async def test_a_stream_reports_an_input_that_is_too_long_as_an_event(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    """Codex reads this code from `response.failed` only. Without a stream it is a 400."""
    engine.script = [ContextLengthError("the prompt has 900 tokens", param="prompt")]
    reply = await client.post(URL, json={"input": "Hi", "stream": True})
    events = named_events(reply.content)
    assert types(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    plain = await client.post(URL, json={"input": "Hi"})
    assert plain.status_code == 400
    assert (plain.json()["error"]["code"], plain.json()["error"]["param"]) == (
        "context_length_exceeded",
        "input",
    )


async def test_a_request_can_be_canceled(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.script = [Piece(["Hel"]), Piece([], "abort")]
    last = (await streamed(client))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    assert last["response"]["error"] is None


async def test_the_whole_of_a_stream_counts_as_a_response(engine: FakeService, make_client: Any) -> None:
    """The last event repeats the output, so its size has the limit of a response that is not streamed."""
    config = CONFIG.model_copy(update={"max_response_bytes": 400})
    engine.script = [Piece(["x" * 100]), Piece(["y" * 100]), Piece(["z" * 100], "stop")]
    state = ServerState(config, models=ModelRegistry([engine]))  # type: ignore[list-item]
    async with make_client(state) as client:
        events = await streamed(client)
        assert types(events)[-1] == "failed"
        assert "max_response_bytes" in events[-1]["response"]["error"]["message"]
        assert (await client.post(URL, json={"input": "Hi"})).status_code == 400
    assert state.response_bytes.n_in_flight == 0
