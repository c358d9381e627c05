"""The input and the fields of POST /v1/responses: what of a chat request they become, and their errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import response_create_params as openai_params

from fakes.service import Call, FakeService
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.registry import ModelRegistry
from llaisys.sampling_params import StructuredOutputsParams as Spec
from llaisys.server.fields import NO_EFFECT
from llaisys.server.request_schemas import MESSAGES_MAX
from llaisys.server.responses.input import RESPONSES_NEUTRAL
from llaisys.server.responses.schemas import ResponsesRequest
from llaisys.server.state import ServerState
from sse import named_events

URL = "/v1/responses"
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "made", "strict": True, "schema": SCHEMA}


@pytest.fixture
def engine() -> FakeService:
    return FakeService(config=Config(enable_auto_tool_choice=True, tool_call_parser="hermes"))


async def messages_of(engine: FakeService, client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    """Return the messages that reach the chat template."""
    reply = await client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    messages, _ = engine.chats[-1]
    return messages


async def error_of(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    raw = json.dumps({"input": "Hi", **body})  # escapes of surrogates, which httpx does not write
    reply = await client.post(URL, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error["param"] in error["message"]
    return error


# --- items ---


async def test_a_text_is_a_user_message(engine: FakeService, client: httpx.AsyncClient) -> None:
    assert await messages_of(engine, client, input="Hi") == [USER]


async def test_instructions_and_system_messages_are_one_message(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    """Qwen's templates reject a second system message."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No jokes."}]},
        USER,
        {"role": "system", "content": "In English."},
    ]
    assert await messages_of(engine, client, input=items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nNo jokes.\n\nIn English."},
        USER,
    ]


async def test_the_items_of_a_turn_are_one_assistant_message(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    def call(call_id: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": '{"a": 1}'}

    items: list[dict[str, Any]] = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hmm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        call("a"),
        call("b"),
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [
                {"type": "reasoning_text", "text": "So"},
                {"type": "reasoning_text", "text": "it is."},
            ],
        },
        {"role": "assistant", "content": "Three."},
        {"role": "assistant", "content": "Really."},
    ]

    def called(call_id: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    assert await messages_of(engine, client, input=items, tools=[FUNCTION]) == [
        USER,
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [called("a"), called("b")],
            "reasoning_content": "Hmm.",
        },
        {"role": "tool", "tool_call_id": "a", "name": "add", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "name": "add", "content": "2"},
        {"role": "assistant", "content": "Three.", "reasoning_content": "So\nit is."},
        {"role": "assistant", "content": "Really."},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "web_search_call"}, "input[1].type"),
        ({"type": 5}, "input[1].type"),
        ({"role": "robot", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"role": "user", "content": "\ud800"}, "input[1].content"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            "input[1].content[0]",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"type": "reasoning", "content": ["x"]}, "input[1].content"),
        ({"type": "reasoning", "summary": "x"}, "input[1].summary"),
        ({"type": "reasoning", "encrypted_content": "?"}, "input[1].encrypted_content"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "a", "arguments": "{}"}, "input[1].name"),
        ({"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}, "input[1].arguments"),
        ({"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}, "input[1].arguments"),
        ({"type": "function_call_output", "call_id": "a"}, "input[1].output"),
        ({"type": "item_reference", "id": "msg_1"}, "input[1]"),
    ],
)
async def test_an_item_that_cannot_be_read_is_named(
    engine: FakeService, client: httpx.AsyncClient, item: dict[str, Any], param: str
) -> None:
    assert (await error_of(client, input=[USER, item]))["param"] == param
    assert not engine.calls


async def test_the_number_of_items_is_bounded(client: httpx.AsyncClient) -> None:
    assert (await error_of(client, input=[USER] * (MESSAGES_MAX + 1)))["param"] == "input"
    assert (await error_of(client, input=[USER, 5]))["param"] == "input"


# --- tools ---


async def test_tools_of_other_types_are_skipped_and_named(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}, FUNCTION, {"type": 5}]
    reply = await client.post(URL, json={"input": "Hi", "tools": tools})
    assert reply.headers["x-llaisys-ignored-fields"] == "tools.web_search,tools.namespace,tools.5"
    assert reply.json()["tools"] == [{**FUNCTION, "description": None, "strict": None}]
    _, options = engine.chats[-1]
    assert options["tools"] == [
        {"type": "function", "function": {"name": "add", "parameters": FUNCTION["parameters"]}}
    ]


async def test_tools_of_other_types_alone_are_no_tools(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    reply = await client.post(URL, json={"input": "Hi", "tools": [{"type": "web_search"}]})
    assert reply.json()["tools"] == []
    assert engine.chats[-1][1]["tools"] is None


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[1].name"),
        ({"type": "function", "name": "a b"}, "tools[1].name"),
        ({"type": "function", "name": "f", "parameters": 5}, "tools[1].parameters"),
    ],
)
async def test_an_invalid_function_is_named(
    client: httpx.AsyncClient, tool: dict[str, Any], param: str
) -> None:
    """The index is that of the body, which counts the skipped tools."""
    assert (await error_of(client, tools=[{"type": "web_search"}, tool]))["param"] == param


async def test_tool_choice(engine: FakeService, client: httpx.AsyncClient) -> None:
    other = {**FUNCTION, "name": "subtract"}

    async def grammar(choice: Any) -> str:
        reply = await client.post(
            URL, json={"input": "Hi", "tools": [FUNCTION, other], "tool_choice": choice}
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["tool_choice"] == choice
        return str(engine.calls[-1].params.structured_outputs)

    assert "add" not in await grammar("none")
    assert "subtract" in await grammar("required")
    named = await grammar({"type": "function", "name": "add"})
    assert "add" in named
    assert "subtract" not in named
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    assert "subtract" not in await grammar(allowed)
    assert await grammar({**allowed, "mode": "auto"}) == "None"
    assert [tool["function"]["name"] for tool in engine.chats[-1][1]["tools"]] == ["add"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        ({"type": "web_search"}, "tool_choice.type"),
        ({"type": "function", "name": "other"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["add"]}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
    ],
)
async def test_an_invalid_tool_choice_is_named(client: httpx.AsyncClient, choice: Any, param: str) -> None:
    assert (await error_of(client, tools=[FUNCTION], tool_choice=choice))["param"] == param


# --- other fields ---


def sampling(name: str, value: Any) -> tuple[dict[str, Any], Callable[[Call], Any], Any]:
    return {name: value}, lambda call: getattr(call.params, name), value


EFFECTS = [
    sampling("temperature", 0.5),
    sampling("top_p", 0.5),
    sampling("top_k", 5),
    sampling("min_p", 0.5),
    sampling("typical_p", 0.5),
    sampling("repetition_penalty", 1.5),
    sampling("presence_penalty", 0.5),
    sampling("frequency_penalty", 0.5),
    sampling("seed", 5),
    sampling("stop", ["x"]),
    sampling("stop_token_ids", [7]),
    sampling("min_tokens", 2),
    sampling("ignore_eos", True),
    sampling("skip_special_tokens", False),
    sampling("include_stop_str_in_output", True),
    ({"logit_bias": {"7": -1.5}}, lambda call: call.params.logit_bias, {7: -1.5}),
    ({"max_output_tokens": 7}, lambda call: call.params.max_tokens, 7),
    ({"top_logprobs": 2}, lambda call: call.params.logprobs, 2),
    ({"include": ["message.output_text.logprobs"]}, lambda call: call.params.logprobs, 0),
    ({"include": ["file_search_call.results"]}, lambda call: call.params.logprobs, None),
    ({"priority": 3}, lambda call: call.options["priority"], 3),
    ({"cache_salt": "s"}, lambda call: call.options["cache_salt"], "s"),
    ({"session_id": "s"}, lambda call: call.options["session_id"], "s"),
    ({"request_id": "mine"}, lambda call: call.request_id, "resp_mine"),
    ({"text": {"format": FORMAT}}, lambda call: call.params.structured_outputs, Spec(json=SCHEMA)),
    (
        {"text": {"format": {"type": "json_object"}}},
        lambda call: call.params.structured_outputs,
        Spec(json_object=True),
    ),
    ({"text": {"format": {"type": "text"}}}, lambda call: call.params.structured_outputs, None),
]


@pytest.mark.parametrize(("body", "shows", "want"), EFFECTS)
async def test_a_field_takes_effect(
    engine: FakeService,
    client: httpx.AsyncClient,
    body: dict[str, Any],
    shows: Callable[[Call], Any],
    want: Any,
) -> None:
    reply = await client.post(URL, json={"input": "Hi", **body})
    assert reply.status_code == 200, reply.text
    assert "x-llaisys-ignored-fields" not in reply.headers
    assert shows(engine.calls[0]) == want


async def test_the_last_message_is_continued(engine: FakeService, client: httpx.AsyncClient) -> None:
    cut = {"role": "assistant", "content": "Hel"}
    body = {"input": [USER, cut], "add_generation_prompt": False, "continue_final_message": True}
    reply = await client.post(URL, json=body)
    assert reply.status_code == 200, reply.text
    messages, options = engine.chats[0]
    assert messages == [USER, cut]
    assert (options["add_generation_prompt"], options["continue_final_message"]) == (False, True)


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ],
)
async def test_the_effort_reaches_the_template(
    engine: FakeService, client: httpx.AsyncClient, body: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert (await client.post(URL, json={"input": "Hi", **body})).status_code == 200
    assert engine.chats[0][1]["template_kwargs"] == kwargs


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_logprobs": 100}, "top_logprobs"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "none"}}, "text.verbosity"),
        ({"truncation": "always"}, "truncation"),
        ({"request_id": "a b"}, "request_id"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"tools": [FUNCTION], "tool_choice": "required", "text": {"format": FORMAT}},
            "tool_choice",
        ),
    ],
)
async def test_an_invalid_field_is_named(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    assert (await error_of(client, **body))["param"] == param


async def test_a_schema_that_does_not_compile_is_named(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    engine.grammar_error = RejectedError("structured_outputs.json is bad", param="structured_outputs.json")
    error = await error_of(client, text={"format": FORMAT})
    assert (error["param"], error["message"]) == ("text.format.schema", "text.format.schema is bad")


async def test_the_format_and_verbosity_are_repeated(client: httpx.AsyncClient) -> None:
    text = {"format": FORMAT, "verbosity": "low"}
    reply = await client.post(URL, json={"input": "Hi", "text": text})
    assert reply.json()["text"] == text
    assert reply.headers["x-llaisys-ignored-fields"] == "text.verbosity"


def test_every_field_of_openai_is_in_one_table() -> None:
    known = set(openai_params.ResponseCreateParamsStreaming.__annotations__)
    known |= set(openai_params.ResponseCreateParamsBase.__annotations__)
    served, neutral = set(ResponsesRequest.model_fields), set(RESPONSES_NEUTRAL)
    assert known <= served | neutral | NO_EFFECT
    assert not served & neutral


@pytest.mark.parametrize("field", RESPONSES_NEUTRAL)
async def test_an_unsupported_field_is_rejected(client: httpx.AsyncClient, field: str) -> None:
    for neutral in (None, *RESPONSES_NEUTRAL[field]):
        assert (await client.post(URL, json={"input": "Hi", field: neutral})).status_code == 200
    assert (await error_of(client, **{field: {"asks": "for something"}}))["param"] == field


async def test_what_codex_sends_is_accepted(client: httpx.AsyncClient) -> None:
    """The fields that Codex sends, as webai-at-home#214 lists them; none is named as ignored."""
    body = {
        "client_metadata": {"x": "y"},
        "include": ["reasoning.encrypted_content"],
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "instructions": "You are Codex.",
        "model": "tiny",
        "parallel_tool_calls": False,
        "prompt_cache_key": "0199",
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "tool_choice": "auto",
        "tools": [FUNCTION],
    }
    reply = await client.post(URL, json=body)
    assert "x-llaisys-ignored-fields" not in reply.headers
    assert named_events(reply.content)[-1]["type"] == "response.completed"


# --- truncation ---


class CountingEngine(FakeService):
    """Every message is 10 tokens; the context has 64."""

    async def chat_prompt(self, messages: Any, **options: Any) -> list[int]:
        await super().chat_prompt(messages, **options)
        return [1] * (10 * len(messages))


def turns(n: int) -> list[dict[str, Any]]:
    return [
        item
        for i in range(n)
        for item in (
            {"role": "user", "content": f"question {i}"},
            {"role": "assistant", "content": f"reply {i}"},
        )
    ]


@pytest.mark.parametrize(
    ("n_turns", "max_tokens", "n_kept"),
    [(1, 4, 1), (2, 4, 2), (3, 4, 2), (9, 4, 2), (9, 24, 1), (9, 34, 0), (9, 60, 9), (9, None, 2)],
)
async def test_truncation_drops_the_oldest_turns(
    make_client: Any, n_turns: int, max_tokens: int | None, n_kept: int
) -> None:
    engine = CountingEngine()
    state = ServerState(Config(), models=ModelRegistry([engine]))  # type: ignore[list-item]
    items = [*turns(n_turns), {"role": "user", "content": "last"}]
    body = {"input": items, "instructions": "Be brief.", "max_output_tokens": max_tokens}
    async with make_client(state) as client:
        reply = await client.post(URL, json={**body, "truncation": "auto"})
        assert reply.json()["truncation"] == "auto"
        kept = len(engine.calls[-1].prompt) // 10
        assert kept == 2 + 2 * n_kept
        messages = next(m for m, _ in reversed(engine.chats) if len(m) == kept)
        assert messages[0] == {"role": "system", "content": "Be brief."}
        assert messages[1:] == items[-(kept - 1) :]
        assert len(engine.chats) <= 1 + 4
        await client.post(URL, json=body)
        assert len(engine.calls[-1].prompt) == 10 * (2 * n_turns + 2)
