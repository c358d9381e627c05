"""POST /v1/completions on a scripted engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fakes.service import FakeService, Piece
from llaisys.errors import QueueFullError
from sse import chunks, events

URL = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("Hi", ["Hi"]),
        ("", [""]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_all_forms_of_the_prompt(
    engine: FakeService, client: httpx.AsyncClient, prompt: Any, submitted: list[Any]
) -> None:
    response = await client.post(URL, json={"prompt": prompt})
    assert response.status_code == 200
    assert [call.prompt for call in engine.calls] == submitted
    assert len({call.request_id for call in engine.calls}) == len(submitted)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(submitted)))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["Hi", True], "prompt[1]"),
        ([[1, -1]], "prompt[0]"),
        ([[1, 2.5]], "prompt[0]"),
        (["a"] * 129, "prompt"),
        (5, "prompt"),
        (None, "prompt"),
        ({"text": "Hi"}, "prompt"),
    ],
)
async def test_invalid_prompts_are_rejected_by_position(
    engine: FakeService, client: httpx.AsyncClient, prompt: Any, param: str
) -> None:
    response = await client.post(URL, json={"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.calls


async def test_a_lone_surrogate_is_rejected(client: httpx.AsyncClient) -> None:
    for body in (
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": ["\ud800"]}',
        rb'{"prompt": "a", "stop": ["\ud800"]}',
    ):
        response = await client.post(URL, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "surrogate" in response.json()["error"]["message"]


async def test_a_model_name_with_a_lone_surrogate_is_unknown(client: httpx.AsyncClient) -> None:
    response = await client.post(
        URL, content=rb'{"prompt": "a", "model": "\ud800"}', headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_unstreamed_completion_has_the_openai_fields(client: httpx.AsyncClient) -> None:
    body = (await client.post(URL, json={"prompt": [5, 6]})).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello!",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 3


async def test_max_tokens_defaults_to_16(engine: FakeService, client: httpx.AsyncClient) -> None:
    await client.post(URL, json={"prompt": "Hi"})
    await client.post(URL, json={"prompt": "Hi", "max_tokens": 3})
    assert [call.params.max_tokens for call in engine.calls] == [16, 3]


async def test_stream_of_two_prompts(client: httpx.AsyncClient) -> None:
    body = {"prompt": [[5, 6], [7]], "stream": True, "stream_options": {"include_usage": True}}
    *parts, last = chunks((await client.post(URL, json=body)).content)
    texts: dict[int, str] = {}
    ends = {}
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "Hello!", 1: "Hello!"}
    assert ends == {0: "stop", 1: "stop"}
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 6)


async def test_completion_logprobs_count_offsets_over_all_chunks(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    engine.script = [Piece(["Hel", "lo"]), Piece(["!"], "stop")]
    body = {"prompt": "Hi", "logprobs": 1}
    logprobs = (await client.post(URL, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["Hel", "lo", "!"],
        "token_logprobs": [-1.0] * 3,
        "top_logprobs": [{"best": -0.5, text: -1.0} for text in ("Hel", "lo", "!")],
        "text_offset": [0, 3, 5],
    }
    parts = chunks((await client.post(URL, json={**body, "stream": True})).content)
    offsets = [o for part in parts for o in part["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 3, 5]


async def test_one_rejected_prompt_ends_all(engine: FakeService, client: httpx.AsyncClient) -> None:
    engine.script = [QueueFullError("full")]
    assert (await client.post(URL, json={"prompt": ["a", "b", "c"]})).status_code == 429
    engine.script = [Piece(["a"]), QueueFullError("full")]
    found = events((await client.post(URL, json={"prompt": ["a", "b", "c"], "stream": True})).content)
    assert found[-2]["error"]["code"] == "server_overloaded"
    assert found.count("[DONE]") == 1
    assert all(call.ended for call in engine.calls)


@pytest.mark.parametrize("field", ["suffix", "best_of", "prompt_embeds"])
async def test_unsupported_legacy_fields_are_rejected_by_name(client: httpx.AsyncClient, field: str) -> None:
    value = {"suffix": "end", "best_of": 2, "prompt_embeds": "AA=="}[field]
    response = await client.post(URL, json={"prompt": "Hi", field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert field in response.json()["error"]["message"]
