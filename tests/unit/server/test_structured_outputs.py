"""Structured outputs, tools and reasoning over HTTP, on a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from fakes.service import FakeService, Piece
from llaisys.config import Config
from llaisys.errors import RejectedError
from llaisys.sampling_params import StructuredOutputsParams as Spec
from llaisys.server.response_body import ChatChoiceBuilder
from llaisys.text.chat_template import ChatTemplate, TemplateSource
from sse import chunks

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "auto", "description": "a name like a choice"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
AUTO = Config(enable_auto_tool_choice=True, tool_call_parser="hermes")


def message_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the deltas of a stream add up to."""
    whole = ChatChoiceBuilder(0)
    for delta in deltas:
        whole.add({"delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None})
    message: dict[str, Any] = json.loads(b"".join(whole.parts(has_logprobs=False)))["message"]
    return message


def bodies(chat_body: dict[str, Any], **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(CHAT, {**chat_body, **fields}), (COMPLETIONS, {"model": "tiny", "prompt": "Hi", **fields})]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, Spec(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Spec(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Spec(json=SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, Spec(json=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, Spec(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Spec(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Spec(grammar='start: "a"')),
        ({"structured_outputs": {"json_object": True, "disable_fallback": False}}, Spec(json_object=True)),
        ({"guided_json": SCHEMA}, Spec(json=SCHEMA)),
        ({"guided_regex": "a+"}, Spec(regex="a+")),
        ({"guided_choice": ["a"]}, Spec(choice=("a",))),
        ({"guided_grammar": 'start: "a"'}, Spec(grammar='start: "a"')),
    ],
)
async def test_all_ways_to_request_a_grammar(
    client: httpx.AsyncClient,
    engine: FakeService,
    chat_body: dict[str, Any],
    fields: dict[str, Any],
    spec: Spec | None,
) -> None:
    for url, body in bodies(chat_body, **fields):
        assert (await client.post(url, json=body)).status_code == 200
    assert [call.params.structured_outputs for call in engine.calls] == [spec, spec]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "(" * 70}}, "structured_outputs.regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
async def test_a_400_names_the_field(
    client: httpx.AsyncClient,
    engine: FakeService,
    chat_body: dict[str, Any],
    fields: dict[str, Any],
    param: str,
) -> None:
    for url, body in bodies(chat_body, **fields):
        response = await client.post(url, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert not engine.calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, None),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
    ],
)
async def test_a_grammar_error_uses_the_field_names_of_the_request(
    client: httpx.AsyncClient,
    engine: FakeService,
    chat_body: dict[str, Any],
    fields: dict[str, Any],
    param: str | None,
) -> None:
    where = "structured_outputs.json"
    engine.grammar_error = RejectedError(f"{where} cannot be kept: no", param=where)
    param = param or "response_format.json_schema.schema"
    for url, body in bodies(chat_body, **fields):
        for stream in (False, True):
            error = (await client.post(url, json={**body, "stream": stream})).json()["error"]
            assert (error["param"], error["message"]) == (param, f"{param} cannot be kept: no")
    assert not engine.calls


# --- tools ---


@pytest.mark.parametrize(
    ("fields", "shown", "grammar"),
    [
        ({}, None, ""),
        ({"tools": [], "tool_choice": "auto"}, None, ""),
        ({"tools": [ADD], "tool_choice": "none"}, None, ""),
        ({"tools": [ADD]}, [ADD], ""),
        ({"tools": [ADD], "tool_choice": "auto"}, [ADD], ""),
        ({"tools": [ADD, NOW], "tool_choice": "required"}, [ADD, NOW], "call: call_0 | call_1"),
        (
            {"tools": [ADD, NOW], "tool_choice": {"type": "function", "function": {"name": "auto"}}},
            [ADD, NOW],
            r"\"name\": \"auto\"",
        ),
    ],
)
async def test_tool_choice_selects_shown_tools_and_grammar(
    client: httpx.AsyncClient,
    engine: FakeService,
    chat_body: dict[str, Any],
    fields: dict[str, Any],
    shown: list[Any] | None,
    grammar: str,
) -> None:
    engine.config = AUTO
    response = await client.post(CHAT, json={**chat_body, **fields})
    assert response.status_code == 200, response.text
    assert engine.chats[0][1]["tools"] == shown
    spec = engine.calls[0].params.structured_outputs
    assert grammar in ((spec.grammar or "") if spec else "")
    assert (spec is None) == (grammar == "")


async def test_one_call_or_several(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    for parallel in (None, True, False):
        body = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": parallel}
        await client.post(CHAT, json={**chat_body, **body})
    grammars = [
        call.params.structured_outputs.grammar or ""
        for call in engine.calls
        if call.params.structured_outputs
    ]
    assert ["{0,15}" in grammar for grammar in grammars] == [True, True, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD]}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [ADD] * 2, "tool_choice": "none"}, "tools[1].function.name"),
        ({"tools": [ADD] * 129}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "a",
                            "parameters": {"properties": {"b": {"enum": ["x" * 70_000]}}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_invalid_tools_are_rejected_by_name(
    client: httpx.AsyncClient,
    engine: FakeService,
    chat_body: dict[str, Any],
    fields: dict[str, Any],
    param: str,
) -> None:
    response = await client.post(CHAT, json={**chat_body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.calls


async def both(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the choice of a whole response, and the choices of the stream's chunks."""
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]
    stream = await client.post(CHAT, json={**body, "stream": True})
    return whole, [choice for chunk in chunks(stream.content) for choice in chunk["choices"]]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message without the ids of its calls, after checking them."""
    calls = [dict(call) for call in message.get("tool_calls", [])]
    ids = [call.pop("id") for call in calls]
    assert len(set(ids)) == len(ids)
    assert all(id.startswith("call_") for id in ids)
    return {**message, "tool_calls": calls} if calls else message


async def test_tool_calls_have_the_openai_shape(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.config = AUTO
    engine.script = [Piece(list("Let me. " + CALL)), Piece(list(CALL)), Piece(finish="stop")]
    whole, stream = await both(client, {**chat_body, "tools": [ADD]})
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    want = {"role": "assistant", "content": "Let me.", "refusal": None, "tool_calls": [call, call]}
    assert without_ids(whole["message"]) == want
    assert whole["finish_reason"] == stream[-1]["finish_reason"] == "tool_calls"
    deltas = [choice["delta"] for choice in stream]
    assert without_ids(message_of(deltas)) == want
    first, second = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta][:2]
    assert sorted(first) == ["function", "id", "index", "type"]
    assert (first["index"], first["function"]) == (0, {"name": "add", "arguments": ""})
    assert second == {"index": 0, "function": {"arguments": '{"a": 1}'}}


async def test_without_parallel_calls_only_the_first_call_is_returned(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.config = AUTO
    engine.script = [Piece([CALL, CALL]), Piece(finish="stop")]
    whole, _ = await both(client, {**chat_body, "tools": [ADD], "parallel_tool_calls": False})
    assert len(whole["message"]["tool_calls"]) == 1
    assert whole["message"]["content"] is None


async def test_each_choice_has_its_own_tool_calls(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.config = AUTO
    engine.script = [
        Piece([CALL[:20]]),
        Piece(["Hello"], index=1),
        Piece([CALL[20:]]),
        Piece([CALL[:9]], index=1),
        Piece(finish="stop"),
        Piece(finish="stop", index=1),
    ]
    body = {**chat_body, "tools": [ADD], "n": 2, "return_token_ids": True}
    whole = (await client.post(CHAT, json=body)).json()["choices"]
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "stop"]
    assert [len(choice["message"].get("tool_calls", ())) for choice in whole] == [1, 0]
    assert whole[1]["message"]["content"] == "Hello" + CALL[:9]
    assert [choice["token_ids"] for choice in whole] == [[100, 102], [101, 103]]
    stream = chunks((await client.post(CHAT, json={**body, "stream": True})).content)
    for index, choice in enumerate(whole):
        parts = [c for chunk in stream for c in chunk["choices"] if c["index"] == index]
        want = without_ids(choice["message"])
        assert without_ids(message_of(part["delta"] for part in parts)) == want
        assert [id for part in parts for id in part.get("token_ids", ())] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("n_calls", [0, 1])
async def test_a_tool_call_truncated_by_max_tokens_is_dropped(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any], n_calls: int
) -> None:
    """It is neither a call nor content; text before it is kept."""
    engine.config = AUTO
    engine.script = [Piece(["Let me. ", *[CALL] * n_calls]), Piece(list(CALL[:30])), Piece(finish="length")]
    whole, stream = await both(client, {**chat_body, "tools": [ADD]})
    assert whole["finish_reason"] == stream[-1]["finish_reason"] == "length"
    for message in (whole["message"], message_of(choice["delta"] for choice in stream)):
        assert (message["content"].strip(), len(message.get("tool_calls", ()))) == ("Let me.", n_calls)


async def test_an_unfinished_tool_call_is_content(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.config = AUTO
    engine.script = [Piece([CALL[:30]]), Piece(finish="stop")]
    whole, _ = await both(client, {**chat_body, "tools": [ADD]})
    assert whole["message"]["content"] == CALL[:30]


async def test_without_tools_the_text_is_content(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.config = AUTO
    engine.script = [Piece([CALL]), Piece(finish="stop")]
    whole, _ = await both(client, {**chat_body, "tools": [ADD], "tool_choice": "none"})
    assert whole["message"]["content"] == CALL
    assert whole["finish_reason"] == "stop"


# --- reasoning ---


async def test_reasoning_is_returned_under_both_names(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.config = Config(reasoning_parser="deepseek_r1")
    engine.script = [Piece(list("Hm. </thi")), Piece(list("nk>\nYes")), Piece(finish="stop")]
    whole, stream = await both(client, {**chat_body, "logprobs": True})
    want = {"content": "Yes", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert whole["message"] == {"role": "assistant", "refusal": None, **want}
    joined = {name: "".join(choice["delta"].get(name) or "" for choice in stream) for name in want}
    assert joined == want
    tokens = [e["token"] for c in stream if c["logprobs"] for e in c["logprobs"]["content"]]
    assert tokens == [e["token"] for e in whole["logprobs"]["content"]] == list("Hm. </think>\nYes")


HERMES_TEMPLATE = '{% if tools %}<tool_call>{"name": <name>, "arguments": <args>}</tool_call>{% endif %}'


async def test_auto_needs_no_settings_if_the_template_shows_a_format(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    body = {**chat_body, "tools": [ADD]}
    refused = (await client.post(CHAT, json=body)).json()["error"]
    assert (refused["param"], refused["code"]) == ("tool_choice", "unsupported_value")
    assert "--tool-call-parser" in refused["message"]
    engine.template = ChatTemplate(TemplateSource({"default": HERMES_TEMPLATE}, {}))
    engine.script = [Piece([CALL], "stop")]
    (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


async def test_reasoning_is_separate_if_the_template_knows_it(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.template = ChatTemplate(TemplateSource({"default": "{{ '<think>' }}"}, {}))
    engine.script = [Piece(["<think>hm</think>Yes"], "stop")]
    (choice,) = (await client.post(CHAT, json=chat_body)).json()["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Yes")


CHANNELS = "{% if tools %}{% endif %}<|start|>assistant<|channel|>analysis<|message|>"


async def test_channels_are_divided_if_the_template_writes_them(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    """Reasoning, a message before the call, and the call, in pieces that divide the tags."""
    engine.template = ChatTemplate(TemplateSource({"default": CHANNELS}, {}))
    text = "<|channel|>analysis<|message|>Hm < 3.<|end|>"
    text += "<|start|>assistant<|channel|>commentary<|message|>I look."
    text += "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    engine.script = [Piece(list(text)), Piece(list('{"a": 1}')), Piece(finish="stop")]
    whole, stream = await both(client, {**chat_body, "tools": [ADD]})
    assert whole["finish_reason"] == "tool_calls"
    function = {"name": "add", "arguments": '{"a": 1}'}
    message = without_ids(whole["message"])
    assert (message["reasoning_content"], message["content"]) == ("Hm < 3.", "I look.")
    assert message["tool_calls"] == [{"type": "function", "function": function}]
    assert without_ids(message_of(choice["delta"] for choice in stream)) == message
    params = [call.params for call in engine.calls]
    assert not any(call.skip_special_tokens for call in params)
    engine.script = [Piece(["<|channel|>analysis<|message|>Hm.<|end|>"]), Piece(finish="length")]
    whole, _ = await both(client, chat_body)
    assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == ("Hm.", None)


GEMMA4 = "{% if tools %}<|tool_call>call:{% endif %}<|channel>thought\n"


async def test_thoughts_and_calls_of_gemma4_are_divided(
    client: httpx.AsyncClient, engine: FakeService, chat_body: dict[str, Any]
) -> None:
    engine.template = ChatTemplate(TemplateSource({"default": GEMMA4}, {}))
    text = "<|channel>thought\nHm < 3.\n<channel|>I look.<|tool_call>call:add{a:1}<tool_call|>"
    engine.script = [Piece(list(text)), Piece(finish="stop")]
    whole, stream = await both(client, {**chat_body, "tools": [ADD]})
    assert whole["finish_reason"] == "tool_calls"
    function = {"name": "add", "arguments": '{"a": 1}'}
    message = without_ids(whole["message"])
    assert (message["reasoning_content"], message["content"]) == ("Hm < 3.", "I look.")
    assert message["tool_calls"] == [{"type": "function", "function": function}]
    assert without_ids(message_of(choice["delta"] for choice in stream)) == message
    assert not any(call.params.skip_special_tokens for call in engine.calls)
    engine.script = [Piece(["<|tool_call>call:add{a:1}<tool_call|>"], "stop")]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        whole, _ = await both(client, {**chat_body, "tools": [ADD], "tool_choice": choice})
        assert without_ids(whole["message"])["tool_calls"] == message["tool_calls"]
        spec = engine.calls[-1].params.structured_outputs
        assert spec is not None
        assert '"<|tool_call>call:add"' in str(spec.grammar)
