"""The official client against a server: every supported call, and every error."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

from serving import Server

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello there"}]


def greedy(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "temperature": 0, "max_tokens": 12, **more}


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == 65536


def test_a_chat_has_a_message_and_its_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=MESSAGES, **greedy())
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def cached(usage: CompletionUsage | None) -> int | None:
    """Return the number of cached prompt tokens."""
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stream_first", [False, True])
def test_the_same_chat_again_has_all_but_its_last_token_cached(
    client: openai.OpenAI, stream_first: bool
) -> None:
    said: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": f"{stream_first} is new"},
        *MESSAGES,
    ]
    usages = []
    for stream in (stream_first, not stream_first):
        if stream:
            *_, last = client.chat.completions.create(
                messages=said, stream=True, stream_options={"include_usage": True}, **greedy()
            )
            usages.append(last.usage)
        else:
            usages.append(client.chat.completions.create(messages=said, **greedy()).usage)
    first, second = usages
    assert first is not None
    assert first.prompt_tokens > cached(first) < cached(second) == first.prompt_tokens - 1  # type: ignore[operator]


def test_the_same_completion_again_has_all_but_its_last_token_cached(client: openai.OpenAI) -> None:
    prompts = [[301, 302, 303, 304], [401, 402, 403]]
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    first = client.completions.create(prompt=prompts, **greedy()).usage
    second = client.completions.create(prompt=prompts, **greedy()).usage
    *_, third = client.completions.create(prompt=prompts, **options, **greedy())
    assert (cached(first), cached(second), cached(third.usage)) == (0, 3 + 2, 3 + 2)


def test_chat_stream_equals_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **greedy(logprobs=True, top_logprobs=3))
    stream = client.chat.completions.create(
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **greedy(logprobs=True, top_logprobs=3),
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == whole.usage.completion_tokens


def test_greedy_tokens_have_the_best_logprob(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(messages=MESSAGES, **greedy(logprobs=True, top_logprobs=2))
    assert reply.choices[0].logprobs is not None
    for entry in reply.choices[0].logprobs.content or []:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_equal_seeds_give_equal_texts(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="tiny", prompt="ab", seed=seed, temperature=1, max_tokens=24)
        .choices[0]
        .text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_every_form_of_prompt_is_completed(client: openai.OpenAI) -> None:
    one = client.completions.create(prompt="Hello", **greedy())
    many = client.completions.create(prompt=["Hello", "There", "Hello"], **greedy())
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.choices[0].text == many.choices[2].text == one.choices[0].text
    ids = client.completions.create(prompt=[5, 6, 7], **greedy())
    lists = client.completions.create(prompt=[[5, 6, 7], [8]], **greedy())
    assert lists.choices[0].text == ids.choices[0].text
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_completions_stream_equals_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=["Hello", "There"], logprobs=2, **greedy())
    texts = {0: "", 1: ""}
    tokens: dict[int, list[str]] = {0: [], 1: []}
    for chunk in client.completions.create(prompt=["Hello", "There"], logprobs=2, stream=True, **greedy()):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
    assert [texts[i] for i in (0, 1)] == [choice.text for choice in whole.choices]
    assert [tokens[i] for i in (0, 1)] == [
        choice.logprobs and choice.logprobs.tokens for choice in whole.choices
    ]


def test_a_stop_string_is_cut_off_and_named(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="Hello", **greedy(extra_body={"ignore_eos": True}))
    text = whole.choices[0].text
    stop = text[3:5]
    cut = client.completions.create(prompt="Hello", stop=[stop], **greedy(extra_body={"ignore_eos": True}))
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra is not None
    assert cut.choices[0].model_extra["stop_reason"] == stop


def test_max_completion_tokens_ends_a_completion(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=3, extra_body={"ignore_eos": True, "top_k": 5}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_a_message_is_continued_without_a_generation_prompt(client: openai.OpenAI) -> None:
    said: list[ChatCompletionMessageParam] = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    body = {"continue_final_message": True}
    reply = client.chat.completions.create(messages=said, extra_body=body, **greedy())
    fresh = client.chat.completions.create(messages=said, **greedy())
    assert reply.usage is not None
    assert fresh.usage is not None
    assert reply.usage.prompt_tokens < fresh.usage.prompt_tokens


def test_ignored_fields_are_named(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES,
        extra_body={"frobnicate": 1},
        user="me",
        extra_headers={"x-request-id": "mine"},
        **greedy(),
    )
    assert raw.headers["x-llaisys-ignored-fields"] == "frobnicate"
    assert raw.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": 2}, "n", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice", "unsupported_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "unsupported_value",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"logit_bias": {"600": 1}}, "logit_bias", "invalid_value"),
    ],
)
def test_bad_requests_name_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"messages": MESSAGES, **greedy(), **fields})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"


def test_an_image_is_refused_by_its_type_and_place(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    with pytest.raises(openai.BadRequestError, match="images, sound and files are not read") as caught:
        client.chat.completions.create(messages=messages, **greedy())
    assert caught.value.param == "messages[0].content[1]"
    assert "image_url" in str(caught.value)


def test_a_request_beyond_the_context_is_rejected_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 10, max_tokens=65536)
    assert caught.value.code == "context_length_exceeded"
    assert "65536" in str(caught.value)


def test_token_ids_are_checked(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[5, 70_000])


def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-7", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-7")


def test_a_full_queue_is_a_rate_limit(client: openai.OpenAI, tiny: Server) -> None:
    """One request runs and four may wait: five more are rejected, and none of them stays."""
    body = {"model": "tiny", "max_tokens": 60_000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(prompt="Hello", stream=True, **body) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(prompt=["Hello"] * 5, **body)
        assert caught.value.code == "server_overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        tiny.until("vllm:num_requests_waiting", 0)
        assert tiny.metric("vllm:num_requests_running") == 1
    tiny.until("vllm:num_requests_running", 0)
