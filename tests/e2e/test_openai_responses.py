"""OpenAI's client and its Responses API against a server of SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import BaseModel

pytestmark = pytest.mark.model
QUESTION = "What is the capital of France?"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    """What the model fills in."""

    is_capital: bool
    number: int


@pytest.fixture(scope="module")
def client(smollm2_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2_server}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "temperature": 0, "max_output_tokens": 24, **more}


def test_a_stream_has_the_text_of_a_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, instructions="Be brief.", **greedy())
    assert whole.output_text
    assert whole.status in ("completed", "incomplete")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = [*client.responses.create(input=QUESTION, instructions="Be brief.", stream=True, **greedy())]
    assert [event.sequence_number for event in events] == [*range(len(events))]  # type: ignore[union-attr]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == text
    assert last.response.usage is not None
    details = last.response.usage.input_tokens_details
    assert details.cached_tokens == last.response.usage.input_tokens - 1


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    options = greedy(max_output_tokens=64)
    parsed = client.responses.parse(input=QUESTION, text_format=City, **options)
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(input=QUESTION, text_format=City, **options) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed.output_parsed


def test_a_tool_is_called_and_its_result_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(
        input="What is the weather in Paris?", tools=[TOOL], tool_choice="required", **greedy()
    )
    (call,) = first.output[:1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        input=[result], previous_response_id=first.id, tools=[TOOL], tool_choice="none", **greedy()
    )
    assert second.output_text
    assert second.previous_response_id == first.id


def test_a_conversation_is_stored(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, **greedy())
    second = client.responses.create(input="Are you sure?", previous_response_id=first.id, **greedy())
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert client.responses.retrieve(second.id) == second
    (item,) = client.responses.input_items.list(second.id).data
    assert item.type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="And now?", previous_response_id=second.id, **greedy())
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_background_response_is_resumed(client: openai.OpenAI) -> None:
    """The first connection is closed after a few events; the second one has the others."""
    options: Any = greedy(background=True, max_output_tokens=48)
    seen: list[ResponseStreamEvent] = []
    with client.responses.create(input=QUESTION, stream=True, **options) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    assert seen[0].type == "response.created"
    id = seen[0].response.id
    seen += client.responses.retrieve(id, stream=True, starting_after=len(seen) - 1)
    assert [event.sequence_number for event in seen] == [*range(len(seen))]  # type: ignore[union-attr]
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    stored = client.responses.retrieve(id)
    assert stored.status in ("completed", "incomplete")
    assert stored.output_text == text
    foreground = client.responses.create(input=QUESTION, **greedy(max_output_tokens=48))
    assert foreground.output_text == text


def test_a_background_response_is_canceled(client: openai.OpenAI) -> None:
    options: Any = greedy(background=True, max_output_tokens=1500, extra_body={"ignore_eos": True})
    made = client.responses.create(input=QUESTION, **options)
    assert made.status in ("queued", "in_progress")
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
