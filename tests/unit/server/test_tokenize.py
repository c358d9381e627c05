"""POST /tokenize and /detokenize on a scripted engine; `tests/e2e/test_embeddings.py` uses a real one."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fakes.core import VOCAB_SIZE
from fakes.service import FakeService
from llaisys.server.fields import TOKENS_NEUTRAL

JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add"}}


async def post(client: httpx.AsyncClient, url: str = "/tokenize", **body: Any) -> Any:
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_prompt_is_tokenized(client: httpx.AsyncClient) -> None:
    want = {"count": 3, "max_model_len": 64, "tokens": [7, 72, 105], "token_strs": None}
    assert await post(client, prompt="Hi") == want
    plain = await post(client, prompt="Hi", add_special_tokens=False, return_token_strs=True, model="tiny")
    assert plain == {**want, "count": 2, "tokens": [72, 105], "token_strs": ["<72>", "<105>"]}


async def test_messages_are_tokenized_like_a_chat_request(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    fields = {
        "messages": MESSAGES,
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "chat_template_kwargs": {"x": 1},
    }
    assert (await post(client, **fields))["tokens"] == [1, 2, 3]
    await post(client, "/v1/chat/completions", **fields)
    as_tokens, as_chat = engine.chats
    # Except that /tokenize accepts any length, and a chat must fit the context.
    assert (as_tokens[1].pop("n_tokens_max"), as_chat[1].pop("n_tokens_max")) == (None, engine.max_model_len)
    assert as_tokens == as_chat
    # Tools are rendered for any tool parser of the server.
    await post(client, messages=MESSAGES, tools=[TOOL])
    assert engine.chats[-1][1]["tools"] == [TOOL]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "Hi", "messages": MESSAGES}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["Hi"]}, "prompt"),
        ({"messages": MESSAGES, "tools": [{"type": "x"}]}, "tools[0]"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        *(({"prompt": "Hi", name: {"asks": "for something"}}, name) for name in TOKENS_NEUTRAL),
    ],
)
async def test_invalid_tokenize_requests_are_rejected(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await client.post("/tokenize", content=json.dumps(body), headers=JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_ids_are_detokenized(client: httpx.AsyncClient) -> None:
    assert await post(client, "/detokenize", tokens=[72, 105]) == {"prompt": "Hi"}
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize("tokens", [[VOCAB_SIZE], [-1], ["a"], None])
async def test_invalid_ids_are_rejected(client: httpx.AsyncClient, tokens: Any) -> None:
    response = await client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize("url", ["/tokenize", "/detokenize"])
async def test_another_model_is_not_found(client: httpx.AsyncClient, url: str) -> None:
    response = await client.post(url, json={"prompt": "Hi", "tokens": [1], "model": "other"})
    assert response.status_code == 404
