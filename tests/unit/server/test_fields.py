"""Every field of both request types: supported (with a case below), ignored, or rejected by name.

The lists come from the pinned `openai` package and from vLLM's extra fields. A field that is in none of our
tables fails here, and so does a supported field without a case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as openai_chat

from fakes.service import Call, FakeService, Piece
from llaisys.errors import RejectedError
from llaisys.sampling_params import StructuredOutputsParams as Spec
from llaisys.server.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, NO_EFFECT
from llaisys.server.protocol import engine_options
from llaisys.server.request_schemas import ChatCompletionRequest, CompletionRequest, StreamOptions
from sse import chunks

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODELS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}
NEUTRALS = {CHAT: CHAT_NEUTRAL, COMPLETIONS: COMPLETION_NEUTRAL}
BASES = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}
VLLM_BOTH = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "priority",
    "cache_salt",
    "return_token_ids",
    "echo",
    "allowed_token_ids",
    "bad_words",
    "add_special_tokens",
    "spaces_between_special_tokens",
    "request_id",
    "return_tokens_as_token_ids",
}
VLLM = {
    CHAT: VLLM_BOTH | {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"},
    COMPLETIONS: VLLM_BOTH,
}
OPENAI = {
    CHAT: openai_chat.CompletionCreateParamsStreaming.__annotations__
    | openai_chat.CompletionCreateParamsNonStreaming.__annotations__,
    COMPLETIONS: openai_completion.CompletionCreateParamsStreaming.__annotations__
    | openai_completion.CompletionCreateParamsNonStreaming.__annotations__,
}


@dataclass(frozen=True)
class Case:
    """A body that uses a field, and its effect on the engine call or on the response."""

    body: Mapping[str, Any]
    shows: Callable[[Call, httpx.Response], Any]
    want: Any = True


def sampling(name: str, value: Any) -> Case:
    """Return a case of a field that becomes a sampling parameter."""
    return Case({name: value}, lambda call, _: getattr(call.params, name), value)


def call_argument(name: str, value: Any) -> Case:
    """Return a case of a field that is another argument of the engine call."""
    return Case({name: value}, lambda call, _: call.options[name], value)


def grammar(name: str, value: Any, spec: Spec) -> Case:
    """Return a case of a field that sets a grammar."""
    return Case({name: value}, lambda call, _: call.params.structured_outputs, spec)


def choice(response: httpx.Response) -> dict[str, Any]:
    made: dict[str, Any] = response.json()["choices"][0]
    return made


SHARED = {
    "model": Case({"model": "alias/of-tiny"}, lambda _, a: a.json()["model"], "alias/of-tiny"),
    "stream": Case({"stream": True}, lambda _, a: a.text.endswith("data: [DONE]\n\n")),
    "stream_options": Case(
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda _, a: chunks(a.content)[-1]["usage"]["completion_tokens"],
        3,
    ),
    "max_tokens": sampling("max_tokens", 5),
    "min_tokens": sampling("min_tokens", 2),
    "temperature": sampling("temperature", 0.5),
    "top_p": sampling("top_p", 0.6),
    "top_k": sampling("top_k", 7),
    "min_p": sampling("min_p", 0.1),
    "typical_p": sampling("typical_p", 0.9),
    "repetition_penalty": sampling("repetition_penalty", 1.1),
    "presence_penalty": sampling("presence_penalty", 0.2),
    "frequency_penalty": sampling("frequency_penalty", -0.3),
    "logit_bias": Case({"logit_bias": {"5": 1.5}}, lambda call, _: call.params.logit_bias, {5: 1.5}),
    "seed": sampling("seed", 42),
    "stop": Case({"stop": "END"}, lambda call, _: call.params.stop, ("END",)),
    "stop_token_ids": sampling("stop_token_ids", [9]),
    "ignore_eos": sampling("ignore_eos", True),
    "skip_special_tokens": sampling("skip_special_tokens", False),
    "include_stop_str_in_output": sampling("include_stop_str_in_output", True),
    "n": sampling("n", 1),
    "logprob_token_ids": Case(
        {"logprobs": 1, "logprob_token_ids": [5]}, lambda call, _: call.params.logprob_token_ids, [5]
    ),
    "allowed_token_ids": sampling("allowed_token_ids", [3, 4]),
    "bad_words": sampling("bad_words", ["no", "never"]),
    "truncate_prompt_tokens": sampling("truncate_prompt_tokens", 1),
    "truncation_side": sampling("truncation_side", "right"),
    "return_token_ids": Case(
        {"return_token_ids": True}, lambda _, a: choice(a)["token_ids"], [100, 101, 102]
    ),
    "priority": call_argument("priority", -3),
    "cache_salt": call_argument("cache_salt", "mine"),
    "session_id": call_argument("session_id", "chat-1"),
    "request_id": Case({"request_id": "my-1"}, lambda _, a: a.json()["id"].endswith("-my-1")),
    "response_format": grammar("response_format", {"type": "json_object"}, Spec(json_object=True)),
    "structured_outputs": grammar("structured_outputs", {"regex": "a+"}, Spec(regex="a+")),
    "guided_json": grammar("guided_json", {"type": "null"}, Spec(json={"type": "null"})),
    "guided_regex": grammar("guided_regex", "a+", Spec(regex="a+")),
    "guided_choice": grammar("guided_choice", ["a"], Spec(choice=["a"])),
    "guided_grammar": grammar("guided_grammar", 'start: "a"', Spec(grammar='start: "a"')),
}
TOOL = {"type": "function", "function": {"name": "add"}}


def calls(call: Call) -> str | None:
    """Return the grammar of a completion that calls tools."""
    spec = call.params.structured_outputs
    return None if spec is None else spec.grammar


SERVED: dict[str, dict[str, Case]] = {
    CHAT: {
        **SHARED,
        "logprob_token_ids": Case(
            {"logprobs": True, "logprob_token_ids": [5]}, lambda call, _: call.params.logprob_token_ids, [5]
        ),
        "messages": Case({}, lambda call, _: call.prompt, [1, 2, 3]),
        "max_completion_tokens": Case(
            {"max_completion_tokens": 4, "max_tokens": 9}, lambda call, _: call.params.max_tokens, 4
        ),
        "logprobs": Case(
            {"logprobs": True},
            lambda _, a: [e["token"] for e in choice(a)["logprobs"]["content"]],
            ["Hel", "lo", "!"],
        ),
        "top_logprobs": Case(
            {"logprobs": True, "top_logprobs": 1},
            lambda _, a: choice(a)["logprobs"]["content"][0]["top_logprobs"][0]["token"],
            "best",
        ),
        "return_tokens_as_token_ids": Case(
            {"logprobs": True, "return_tokens_as_token_ids": True},
            lambda _, a: choice(a)["logprobs"]["content"][0]["token"],
            "token_id:100",
        ),
        "prompt_logprobs": Case(
            {"prompt_logprobs": 0},
            lambda _, a: a.json()["prompt_logprobs"],
            [None, *({str(i): {"logprob": -1.0, "rank": 2, "decoded_token": f"<{i}>"}} for i in (2, 3))],
        ),
        "echo": Case(
            {
                "messages": [{"role": "assistant", "content": "So: "}],
                "continue_final_message": True,
                "echo": True,
            },
            lambda _, a: choice(a)["message"]["content"],
            "So: Hello!",
        ),
        # `test_structured_outputs.py` has more of these.
        "tools": Case({"tools": [TOOL], "tool_choice": "required"}, lambda c, _: "add" in str(calls(c))),
        "tool_choice": Case({"tools": [TOOL], "tool_choice": "none"}, lambda c, _: calls(c), None),
        "parallel_tool_calls": Case(
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            lambda c, _: "{0,15}" not in str(calls(c)),
        ),
        "prediction": Case(
            {"prediction": {"type": "content", "content": [{"type": "text", "text": t} for t in ("a", "b")]}},
            lambda call, a: (call.params.prediction, a.json()["usage"]["completion_tokens_details"]),
            ("ab", {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}),
        ),
        # These are arguments of the template: `test_chat.py` checks their values.
        "add_generation_prompt": Case({"add_generation_prompt": False}, lambda _, a: a.status_code, 200),
        "continue_final_message": Case({"continue_final_message": True}, lambda _, a: a.status_code, 200),
        "chat_template_kwargs": Case({"chat_template_kwargs": {"x": 1}}, lambda _, a: a.status_code, 200),
        "add_special_tokens": Case({"add_special_tokens": True}, lambda _, a: a.status_code, 200),
        "reasoning_effort": Case({"reasoning_effort": "low"}, lambda _, a: a.status_code, 200),
    },
    COMPLETIONS: {
        **SHARED,
        "prompt": Case({}, lambda call, _: call.prompt, "Hi"),
        "logprobs": Case({"logprobs": 1}, lambda _, a: choice(a)["logprobs"]["tokens"], ["Hel", "lo", "!"]),
        "return_tokens_as_token_ids": Case(
            {"logprobs": 0, "return_tokens_as_token_ids": True},
            lambda _, a: choice(a)["logprobs"]["tokens"],
            ["token_id:100", "token_id:101", "token_id:102"],
        ),
        "prompt_logprobs": Case(
            {"prompt_logprobs": 1},
            lambda _, a: [None if e is None else list(e) for e in choice(a)["prompt_logprobs"]],
            [None, [str(ord("i")), "9000"]],
        ),
        "echo": Case({"echo": True}, lambda _, a: choice(a)["text"], "HiHello!"),
        "best_of": Case({"best_of": 1}, lambda _, a: a.status_code, 200),
        "add_special_tokens": call_argument("add_special_tokens", False),
    },
}


@pytest.mark.parametrize("url", MODELS)
def test_every_known_field_is_in_one_table(url: str) -> None:
    served, neutral = set(MODELS[url].model_fields), set(NEUTRALS[url])
    known = set(OPENAI[url]) | VLLM[url]
    assert known <= served | neutral | NO_EFFECT
    assert not served & neutral
    assert not (served | neutral) & NO_EFFECT


def test_every_stream_option_is_in_one_table() -> None:
    without_effect = {n.removeprefix("stream_options.") for n in NO_EFFECT if n.startswith("stream_options.")}
    known = set(ChatCompletionStreamOptionsParam.__annotations__)
    assert known <= set(StreamOptions.model_fields) | without_effect


@pytest.mark.parametrize("url", MODELS)
def test_every_supported_field_has_a_case(url: str) -> None:
    assert set(SERVED[url]) == set(MODELS[url].model_fields)
    assert all(field in case.body or field in BASES[url] for field, case in SERVED[url].items())


@pytest.mark.parametrize(("url", "field"), [(url, field) for url in SERVED for field in SERVED[url]])
async def test_a_supported_field_takes_effect(
    engine: FakeService, client: httpx.AsyncClient, url: str, field: str
) -> None:
    case = SERVED[url][field]
    response = await client.post(url, json={**BASES[url], **case.body})
    assert response.status_code == 200, response.text
    assert "x-llaisys-ignored-fields" not in response.headers
    assert case.shows(engine.calls[0], response) == case.want
    null = await client.post(url, json={**BASES[url], field: None})
    assert null.status_code == (400 if field in BASES[url] else 200)


@pytest.mark.parametrize(("url", "field"), [(url, field) for url in NEUTRALS for field in NEUTRALS[url]])
async def test_an_unsupported_field_is_rejected(
    engine: FakeService, client: httpx.AsyncClient, url: str, field: str
) -> None:
    for neutral in (None, *NEUTRALS[url][field]):
        assert (await client.post(url, json={**BASES[url], field: neutral})).status_code == 200
    engine.calls.clear()
    response = await client.post(url, json={**BASES[url], field: {"asks": "for something"}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert field in response.json()["error"]["message"]
    assert not engine.calls


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        (CHAT, {"n": 9}, "n"),
        (CHAT, {"n": 0}, "n"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CHAT, {"truncation_side": "middle"}, "truncation_side"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (CHAT, {"allowed_token_ids": [-1]}, "allowed_token_ids"),
        (CHAT, {"bad_words": [""]}, "bad_words"),
        (CHAT, {"prediction": {"content": "a"}}, "prediction.type"),
        (CHAT, {"prediction": {"type": "content"}}, "prediction.content"),
        (CHAT, {"prediction": {"type": "content", "content": 1}}, "prediction.content"),
        (CHAT, {"prediction": {"type": "content", "content": ["a"]}}, "prediction.content[0]"),
        (CHAT, {"prediction": {"type": "content", "content": "a", "more": 1}}, "prediction.more"),
        (CHAT, {"bad_words": ["x"] * 129}, "bad_words"),
        (CHAT, {"priority": 2**31}, "priority"),
        (CHAT, {"cache_salt": "x" * 257}, "cache_salt"),
        (CHAT, {"request_id": "a b"}, "request_id"),
        (COMPLETIONS, {"request_id": "x" * 65}, "request_id"),
    ],
)
async def test_a_value_out_of_bounds_is_rejected(
    engine: FakeService, client: httpx.AsyncClient, url: str, body: dict[str, Any], param: str
) -> None:
    response = await client.post(url, json={**BASES[url], **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert param in response.json()["error"]["message"]
    assert not engine.calls


def test_a_priority_above_other_clients_is_rejected() -> None:
    body = CompletionRequest(prompt="Hi", priority=-1)
    assert engine_options(body, "", FakeService())["priority"] == -1
    with pytest.raises(RejectedError, match="priority is -1, allowed are 0"):
        engine_options(body, "another key", FakeService())


# --- several choices ---

TWO = [Piece(["a"]), Piece(["x"], index=1), Piece(["y"], "length", index=1), Piece(["b"], "stop")]


def joined(parts: list[dict[str, Any]], url: str) -> dict[int, tuple[str, str]]:
    """Return text and finish reason by choice, after checking that no text follows a finish reason."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for part in parts:
        (made,) = part["choices"]
        index = made["index"]
        assert index not in ends
        text = made["delta"].get("content", "") if url == CHAT else made["text"]
        texts[index] = texts.get(index, "") + text
        if made["finish_reason"]:
            ends[index] = made["finish_reason"]
    return {index: (texts[index], ends[index]) for index in sorted(texts)}


@pytest.mark.parametrize("url", MODELS)
async def test_streamed_choices_equal_whole_choices(
    engine: FakeService, client: httpx.AsyncClient, url: str
) -> None:
    engine.script = TWO
    body = {**BASES[url], "n": 2, "return_token_ids": True}
    whole = (await client.post(url, json=body)).json()
    texts = [c["message"]["content"] if url == CHAT else c["text"] for c in whole["choices"]]
    assert [c["index"] for c in whole["choices"]] == [0, 1]
    assert (texts, [c["finish_reason"] for c in whole["choices"]]) == (["ab", "xy"], ["stop", "length"])
    assert [c["token_ids"] for c in whole["choices"]] == [[100, 103], [101, 102]]
    assert whole["usage"]["completion_tokens"] == 4
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = chunks((await client.post(url, json={**body, **options})).content)
    assert joined(parts, url) == {0: ("ab", "stop"), 1: ("xy", "length")}
    assert last["usage"] == whole["usage"]
    if url == CHAT:
        assert [p["choices"][0]["delta"]["role"] for p in parts[:2]] == ["assistant"] * 2
        assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [1, 2, 3]


async def test_the_index_of_a_choice_counts_prompts_first(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    engine.script = TWO
    body = {"prompt": ["P", "Q"], "n": 2, "echo": True}
    whole = (await client.post(COMPLETIONS, json=body)).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [
        (0, "Pab"),
        (1, "Pxy"),
        (2, "Qab"),
        (3, "Qxy"),
    ]
    assert whole["usage"]["prompt_tokens"] == 2
    parts = chunks((await client.post(COMPLETIONS, json={**body, "stream": True})).content)
    assert [text for text, _ in joined(parts, COMPLETIONS).values()] == ["Pab", "Pxy", "Qab", "Qxy"]


async def test_an_echoed_prompt_has_logprobs(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.script = TWO
    body = {"prompt": "Hi", "n": 2, "echo": True, "logprobs": 0}
    whole = (await client.post(COMPLETIONS, json=body)).json()
    assert engine.calls[0].params.prompt_logprobs == 0
    i = f"<{ord('i')}>"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["H", i, "a", "b"],
        "token_logprobs": [None, -1.0, -1.0, -1.0],
        "top_logprobs": [None, {i: -1.0}, {"a": -1.0}, {"b": -1.0}],
        "text_offset": [0, 1, 1 + len(i), 2 + len(i)],
    }
    assert whole["choices"][1]["logprobs"]["tokens"] == ["H", i, "x", "y"]
    assert whole["choices"][0]["prompt_logprobs"] is None
    parts = chunks((await client.post(COMPLETIONS, json={**body, "stream": True})).content)
    streamed: dict[int, list[str]] = {0: [], 1: []}
    for part in parts:
        (made,) = part["choices"]
        streamed[made["index"]] += (made["logprobs"] or {"tokens": []})["tokens"]
    assert list(streamed.values()) == [c["logprobs"]["tokens"] for c in whole["choices"]]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": [72, 105]}, "Hi"),
        ({"prompt": "Hi", "truncate_prompt_tokens": 1}, "i"),
        ({"prompt": "Hi", "truncate_prompt_tokens": 9}, "Hi"),
    ],
)
async def test_the_echoed_prompt_is_the_truncated_one(
    client: httpx.AsyncClient, body: dict[str, Any], text: str
) -> None:
    response = await client.post(COMPLETIONS, json={**body, "echo": True})
    assert choice(response)["text"] == f"{text}Hello!"
