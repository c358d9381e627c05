"""A stream equals the whole response token by token.

With each option of each endpoint, characters of several bytes, random reads, and many streams at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llaisys.server.request_schemas import ChatCompletionRequest, CompletionRequest
from serving import Server, long_model, serving
from sse import chunks
from wire import read_at_random

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SEED = 20261121
N_CONCURRENT = 64
TEXTS = (
    "天气很好，🌞🌈！再见",
    'naïve "quotes"\n\tand 👩‍👩‍👧‍👦 families',
    "日本語テキスト、それと emoji 🎉 の終わり",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["東京", "Zürich 🏔"]}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["天", "🌈"]}}, "required": ["a"]}
# Added to every case, so that tokens are compared and not only texts.
SHOWN = {
    CHAT: {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    COMPLETIONS: {"logprobs": 2, "return_token_ids": True},
}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello 🌍, 你好"}]},
    COMPLETIONS: {"prompt": "Hello 🌍, 你好"},
}
SAMPLED = {"max_tokens": 24, "seed": SEED, "temperature": 1.0}
# field -> bodies that use it; `test_every_field_has_a_case` compares them with the request types.
SHARED: dict[str, list[dict[str, Any]]] = {
    "model": [{"model": "default"}],
    "stream_options": [{"stream_options": {"include_usage": True, "continuous_usage_stats": True}}],
    "max_tokens": [{"max_tokens": 1}, {"max_tokens": 60}],
    "min_tokens": [{"min_tokens": 5}],
    "temperature": [{"temperature": 0}, {"temperature": 1.7}],
    "top_p": [{"top_p": 0.4}],
    "top_k": [{"top_k": 3}],
    "min_p": [{"min_p": 0.05}],
    "typical_p": [{"typical_p": 0.6}],
    "repetition_penalty": [{"repetition_penalty": 1.3}],
    "presence_penalty": [{"presence_penalty": 1.0}],
    "frequency_penalty": [{"frequency_penalty": 1.0}],
    "logit_bias": [{"logit_bias": {"161": 5, "97": 5, "102": 5}}],
    "seed": [{"seed": 3}],
    "stop": [
        *(
            {"guided_choice": [text], "stop": [stop]}
            for text, stop in zip(TEXTS, ("，🌞", "qu", "の終"), strict=True)
        ),
        {"guided_choice": [TEXTS[0]], "stop": ["never", "🌈！", "再"]},
        {"guided_choice": [TEXTS[0]], "stop": "天"},
    ],
    "stop_token_ids": [{"guided_choice": [TEXTS[0]], "stop_token_ids": [172]}],
    "ignore_eos": [{"ignore_eos": True, "logit_bias": {"599": 4}}],
    "skip_special_tokens": [{"skip_special_tokens": False, "logit_bias": {"599": 4}}],
    "include_stop_str_in_output": [
        {"guided_choice": [TEXTS[0]], "stop": ["，🌞"], "include_stop_str_in_output": True}
    ],
    "response_format": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
    ],
    "structured_outputs": [{"structured_outputs": {"regex": "(天|🌈|a){9}"}}],
    "guided_json": [{"guided_json": SCHEMA}],
    "guided_regex": [{"guided_regex": "[你-好🌀-🌏]{6}"}],
    "guided_choice": [{"guided_choice": [text]} for text in TEXTS],
    "guided_grammar": [{"guided_grammar": 'start: "天" | "🌈🌈"'}],
    "n": [{"n": 3}, {"n": 8, "max_tokens": 9}],
    "logprob_token_ids": [{"logprob_token_ids": [161, 97]}],
    "allowed_token_ids": [{"allowed_token_ids": [161, 97, 102, 172, 253, 234, 252]}],
    "bad_words": [{"bad_words": ["天", "a"]}],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 3}],
    "truncation_side": [{"truncate_prompt_tokens": 3, "truncation_side": "right"}],
    "add_special_tokens": [{"add_special_tokens": True}, {"add_special_tokens": False}],
    "return_token_ids": [{"return_token_ids": False}],
    "return_tokens_as_token_ids": [{"return_tokens_as_token_ids": True}],
    "priority": [{"priority": 3}],
    "cache_salt": [{"cache_salt": "salt"}],
    "request_id": [{"request_id": "mine"}],
    "session_id": [{"session_id": "mine"}],
}
CASES: dict[str, dict[str, list[dict[str, Any]]]] = {
    CHAT: {
        **SHARED,
        "messages": [{"messages": [{"role": "system", "content": "天"}, {"role": "user", "content": "🌈"}]}],
        "max_completion_tokens": [{"max_completion_tokens": 7}],
        "logprobs": [{"logprobs": False, "top_logprobs": None}],
        "top_logprobs": [{"top_logprobs": 20}, {"top_logprobs": 0, "n": 2}],
        "add_generation_prompt": [{"add_generation_prompt": False}],
        "continue_final_message": [
            {"messages": [{"role": "assistant", "content": "So 天"}], "continue_final_message": True}
        ],
        "echo": [
            {
                "messages": [{"role": "assistant", "content": "So 天"}],
                "continue_final_message": True,
                "echo": True,
                "n": 2,
            }
        ],
        "reasoning_effort": [{"reasoning_effort": "low"}],
        "chat_template_kwargs": [{"chat_template_kwargs": {"unused": True}}],
        "tools": [{"tools": [TOOL], "tool_choice": "required", "max_tokens": 300}],
        "tool_choice": [
            {"tools": [TOOL], "tool_choice": "none"},
            {"tools": [TOOL], "tool_choice": "auto"},
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "max_tokens": 200,
                "n": 2,
            },
        ],
        # A text needs speculative decoding, which this server does not have.
        "prediction": [{"prediction": {"type": "content", "content": ""}}],
        "parallel_tool_calls": [
            {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        ],
    },
    COMPLETIONS: {
        **SHARED,
        "prompt": [
            {"prompt": ["one 🌞", "two 天"]},
            {"prompt": [161, 97, 102]},
            {"prompt": [[5, 6, 7], [161, 97]], "n": 2},
        ],
        "logprobs": [{"logprobs": None}, {"logprobs": 0}, {"logprobs": 20}],
        "echo": [{"echo": True}, {"echo": True, "n": 2, "logprobs": 1}, {"echo": True, "logprobs": None}],
        "best_of": [{"best_of": 1}],
    },
}
# They cannot be streamed, and are rejected.
NOT_STREAMED = {"prompt_logprobs": {"prompt_logprobs": 1}}
PAIRS = [
    pytest.param(path, body, id=f"{path.split('/')[2]}-{field}-{i}")
    for path, cases in CASES.items()
    for field, bodies in cases.items()
    for i, body in enumerate(bodies)
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streams")
    flags = ("--num-kv-cells", "65536", "--max-num-seqs", "64", "--dtype", "float32")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with serving(folder, str(long_model(folder)), *flags, *tools) as server:
        yield server


def collected(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the frames of a stream, computed without the code of the server."""
    whole: dict[str, Any] = {"usage": None, "prompt_token_ids": None, "choices": {}}
    assert len({frame["id"] for frame in frames}) == 1, "frames of two responses"
    for frame in frames:
        whole["usage"] = frame.get("usage") or whole["usage"]
        whole["prompt_token_ids"] = frame.get("prompt_token_ids") or whole["prompt_token_ids"]
        for part in frame["choices"]:
            one = whole["choices"].setdefault(part["index"], {"parts": {}, "end": None, "stop": None})
            assert one["end"] is None, "a chunk after the choice's end"
            one["end"], one["stop"] = part["finish_reason"], part["stop_reason"]
            join(one["parts"], {**part.get("delta", {}), **{n: part.get(n) for n in ("text", "token_ids")}})
            join(one["parts"], {"prompt_token_ids": part.get("prompt_token_ids")})
            join(one["parts"], {f"logprobs.{n}": v for n, v in (part["logprobs"] or {}).items()})
    assert all(one["end"] is not None for one in whole["choices"].values())
    return whole


def join(made: dict[str, Any], news: dict[str, Any]) -> None:
    """Append texts and lists, and tool calls by their index; the role comes once."""
    for name, value in news.items():
        if not value:
            continue
        if name == "tool_calls":
            calls = made.setdefault(name, {})
            for call in value:
                join(calls.setdefault(call["index"], {}), {**call["function"], "id": call.get("id")})
        elif name == "role" or name == "id":
            assert made.setdefault(name, value) == value
        else:
            made[name] = made[name] + value if name in made else value


def as_stream(response: dict[str, Any]) -> dict[str, Any]:
    """Return a whole response in the form of `collected`."""
    made: dict[str, Any] = {
        "usage": response["usage"],
        "prompt_token_ids": response.get("prompt_token_ids"),
        "choices": {},
    }
    for choice in response["choices"]:
        parts: dict[str, Any] = {}
        message = dict(choice.get("message", {}))
        calls = message.pop("tool_calls", None) or []
        join(parts, {**message, **{n: choice.get(n) for n in ("text", "token_ids", "prompt_token_ids")}})
        join(parts, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        join(parts, {f"logprobs.{n}": v for n, v in (choice["logprobs"] or {}).items()})
        made["choices"][choice["index"]] = {
            "parts": parts,
            "end": choice["finish_reason"],
            "stop": choice["stop_reason"],
        }
    return made


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Remove what differs between equal requests: the ids of tool calls, and the cached tokens."""
    for choice in response["choices"].values():
        for call in choice["parts"].get("tool_calls", {}).values():
            assert call.pop("id")
    response["usage"].pop("prompt_tokens_details")
    return response


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, ChatCompletionRequest), (COMPLETIONS, CompletionRequest)]
)
def test_every_field_has_a_case(path: str, fields: Any) -> None:
    assert set(CASES[path]) | set(NOT_STREAMED) | {"stream"} == set(fields.model_fields)
    assert all(field in body for field, bodies in CASES[path].items() for body in bodies)


@pytest.mark.parametrize(("path", "body"), PAIRS)
def test_a_stream_equals_the_whole_response(wide: Server, path: str, body: dict[str, Any]) -> None:
    request_body = {**BASES[path], **SAMPLED, **SHOWN[path], **body}
    options = {"include_usage": True, **body.get("stream_options", {})}
    whole = wide.http.post(path, json={**request_body, "stream_options": None})
    assert whole.status_code == 200, whole.text
    raw = read_at_random(wide, path, {**request_body, "stream": True, "stream_options": options}, SEED)
    assert without_ids(collected(chunks(raw))) == without_ids(as_stream(whole.json()))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("text", TEXTS)
def test_a_chosen_text_arrives_unchanged(wide: Server, path: str, text: str) -> None:
    """Compared with the text itself: both forms could be wrong in the same way."""
    body = {**BASES[path], **SAMPLED, "max_tokens": 200, "guided_choice": [text], "stream": True}
    made = collected(chunks(read_at_random(wide, path, body, SEED)))["choices"][0]
    assert made["parts"]["content" if path == CHAT else "text"] == text
    assert made["end"] == "stop"


def test_fields_that_cannot_be_streamed_are_rejected(wide: Server) -> None:
    for path in (CHAT, COMPLETIONS):
        for field, body in NOT_STREAMED.items():
            response = wide.http.post(path, json={**BASES[path], **body, "stream": True})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_many_streams_never_cross(wide: Server) -> None:
    """Each of 64 concurrent streams has the tokens that it has alone."""

    def body(i: int) -> dict[str, Any]:
        return {"prompt": [5 + i, 60, 7 + i], "max_tokens": 24, "seed": i, "ignore_eos": True, "logprobs": 1}

    alone = [wide.http.post(COMPLETIONS, json=body(i)).json() for i in range(N_CONCURRENT)]
    with ThreadPoolExecutor(N_CONCURRENT) as pool:
        streams = [
            pool.submit(read_at_random, wide, COMPLETIONS, {**body(i), "stream": True, "n": 1}, SEED + i)
            for i in range(N_CONCURRENT)
        ]
        frames = [chunks(stream.result()) for stream in streams]
    assert len({frame[0]["id"] for frame in frames}) == N_CONCURRENT
    assert len({json.dumps(response["choices"]) for response in alone}) == N_CONCURRENT, (
        "equal completions would hide a mix-up"
    )
    for whole, got in zip(alone, frames, strict=True):
        assert collected(got)["choices"] == as_stream(whole)["choices"]
