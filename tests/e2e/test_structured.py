"""Structured outputs and tools with the official client, on SmolLM2.

The model was not trained for tools, so the grammar produces the calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from schemas import schema
from serving import Server
from sse import events

pytestmark = pytest.mark.model
N_SCHEMAS = 200
CHAT: Any = [{"role": "user", "content": "Make up a record as JSON."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_color",
        "parameters": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "green"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def api(smollm2: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def schema_request(seed: int, **fields: Any) -> dict[str, Any]:
    """Return a request for a record with the schema of this seed."""
    format = {"type": "json_schema", "json_schema": {"name": "record", "schema": schema(seed)}}
    request_body = {
        "model": "smollm2",
        "messages": CHAT,
        "seed": seed,
        "max_tokens": 96,
        "response_format": format,
    }
    return {**request_body, **fields}


async def test_completions_of_two_hundred_schemas_are_valid(smollm2: Server) -> None:
    """All run at the same time: every completion that stops is valid, and nearly all stop."""
    base_url = f"{smollm2.url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="EMPTY", max_retries=0, timeout=None) as client:
        given = await asyncio.gather(
            *(
                client.chat.completions.create(**schema_request(seed, temperature=0.8))
                for seed in range(N_SCHEMAS)
            )
        )
    responses = [each.choices[0] for each in given]
    ended = [seed for seed, response in enumerate(responses) if response.finish_reason == "stop"]
    for seed in ended:
        jsonschema.validate(json.loads(responses[seed].message.content), schema(seed))
    assert len(ended) >= 0.9 * N_SCHEMAS
    assert {response.finish_reason for response in responses} <= {"stop", "length"}


@pytest.mark.parametrize("seed", range(3))
def test_a_streamed_record_equals_the_whole_one(api: openai.OpenAI, seed: int) -> None:
    request_body = schema_request(seed)
    whole = api.chat.completions.create(**request_body).choices[0]
    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content or ""), schema(seed))
    stream = api.chat.completions.create(**request_body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content


def test_a_completion_is_one_of_the_given_choices(api: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["blue", "red"]}}
    response = api.completions.create(model="smollm2", prompt=["The sky is", "Blood is"], extra_body=extra)
    assert all(choice.text in ("blue", "red") for choice in response.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_does_not_compile_is_a_400(api: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(
            model="smollm2",
            messages=CHAT,
            stream=stream,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )
    assert error.value.param == "response_format.json_schema.schema"


PROPERTIES: Any = {"type": "object", "properties": {f"p{i}": {} for i in range(800)}}


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text can complete it"),
        ({"guided_grammar": "start: start"}, "guided_grammar", "no text can complete it"),
        ({"structured_outputs": {"json": PROPERTIES}}, "structured_outputs.json", "more than 750 optional"),
        # Takes a hundredth of the CPU time that a trial may take, so the limit of work is always the first.
        ({"guided_regex": "(a{0,300}){300}"}, "guided_regex", "make their repetitions smaller"),
        ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "guided_json", "0.5 s of CPU time"),
    ],
)
def test_a_hostile_grammar_is_a_400_that_names_its_field(
    smollm2: Server, fields: dict[str, Any], field: str, says: str
) -> None:
    response = smollm2.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 8, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert field in error["message"]
    assert says in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_color"}}])
def test_a_required_tool_call_is_valid_and_streams_alike(api: openai.OpenAI, choice: Any) -> None:
    request_body: Any = {
        "model": "smollm2",
        "messages": CHAT,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 64,
        "seed": 1,
    }
    whole = api.chat.completions.create(**request_body).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["color"] in ("red", "green")
    pieces = [c.choices[0].delta.tool_calls for c in api.chat.completions.create(**request_body, stream=True)]
    functions = [piece.function for calls in pieces for piece in calls or [] if piece.function]
    assert functions[0].name == call.function.name
    assert "".join(function.arguments or "" for function in functions) == call.function.arguments


def test_fields_that_allow_no_token_are_named(smollm2: Server) -> None:
    """At the first token, and later during a stream."""
    request_body: Any = {"prompt": "Hello", "structured_outputs": {"regex": "a"}, "bad_words": ["a"]}
    response = smollm2.http.post("/v1/completions", json=request_body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        "structured_outputs",
        "invalid_value",
    )
    assert "structured_outputs and bad_words leave no token after 0 tokens" in error["message"]
    request_body |= {"structured_outputs": {"regex": "[0-9][0-9]x"}, "bad_words": ["x"], "stream": True}
    *frames, error, done = events(smollm2.http.post("/v1/completions", json=request_body).content)
    assert "".join(frame["choices"][0]["text"] for frame in frames).isdigit()
    assert (error["error"]["code"], error["error"]["param"]) == ("invalid_value", "structured_outputs")
    assert done == "[DONE]"
