"""Anthropic's client against a server of SmolLM2: messages, streams, tools, counts and errors.

The model was not trained for tools, so the grammar produces the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from serving import Server

pytestmark = pytest.mark.model
MESSAGES: list[MessageParam] = [{"role": "user", "content": "What is gravity?"}]
LONG = "a " * 10_000
TOOL: ToolParam = {
    "name": "set_color",
    "input_schema": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def api(smollm2: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=smollm2.url, api_key="EMPTY", max_retries=0) as made:
        yield made


def greedy(**more: Any) -> dict[str, Any]:
    # The client no longer has the field `temperature`; the API has it.
    extra = {"temperature": 0}
    return {"model": "smollm2", "max_tokens": 16, "messages": MESSAGES, "extra_body": extra, **more}


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_a_streamed_message_is_the_message(api: anthropic.Anthropic) -> None:
    whole = api.messages.create(**greedy(system="You are a physicist."))
    with api.messages.stream(**greedy(system="You are a physicist.")) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == text_of(whole) == text_of(streamed)
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == 16
    assert whole._request_id


def test_the_prompt_is_counted_and_cached(api: anthropic.Anthropic) -> None:
    asked = greedy(system="Count these tokens.")
    prompt = {name: asked[name] for name in ("model", "messages", "system")}
    n_tokens = api.messages.count_tokens(**prompt).input_tokens
    usages = [api.messages.create(**asked).usage for _ in range(2)]
    for usage in usages:
        assert usage.cache_read_input_tokens is not None
        assert usage.input_tokens + usage.cache_read_input_tokens == n_tokens
    assert usages[1].input_tokens == 1


def test_the_attribution_line_does_not_change_the_prompt(api: anthropic.Anthropic) -> None:
    """Claude Code's first system block is different in each request."""
    usages = []
    for cch in ("36ee5", "0aaa9"):
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={cch};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You are an agent."}]
        usages.append(api.messages.create(**greedy(system=system)).usage)
    assert usages[1].input_tokens == 1


def test_tools_are_called_and_their_results_are_read(api: anthropic.Anthropic) -> None:
    asked = greedy(
        max_tokens=64, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    first = api.messages.create(**asked)
    (call,) = first.content
    assert call.type == "tool_use"
    assert call.name == "set_color"
    assert call.input["color"] in ("red", "green")
    assert first.stop_reason == "tool_use"
    with api.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == call.input
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Thanks!"}]},
    ]
    last = api.messages.create(**greedy(messages=turns, tools=[TOOL], tool_choice={"type": "none"}))
    assert text_of(last)


def test_a_stop_sequence_is_cut_off_and_named(api: anthropic.Anthropic) -> None:
    text = text_of(api.messages.create(**greedy()))
    stop = text[6:9]
    cut = api.messages.create(**greedy(stop_sequences=[stop, "\u2028"]))
    assert text_of(cut) == text[: text.index(stop)]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_a_prefilled_message_is_continued(api: anthropic.Anthropic) -> None:
    whole = text_of(api.messages.create(**greedy()))
    turns = [*MESSAGES, {"role": "assistant", "content": whole[:12]}]
    assert text_of(api.messages.create(**greedy(messages=turns))).startswith(whole[12:24])


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"model": "gpt-7"}, anthropic.NotFoundError, "gpt-7"),
        ({"messages": []}, anthropic.BadRequestError, "messages is empty"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "a " * 5000}]},
            anthropic.BadRequestError,
            "prompt is too long",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "'image'",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(
    api: anthropic.Anthropic,
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    says: str,
    stream: bool,
) -> None:
    with pytest.raises(error, match=says) as caught:
        api.messages.create(**greedy(**fields), stream=stream)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
