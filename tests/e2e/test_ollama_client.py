"""Ollama's Python client against a server: every call that Home Assistant and VS Code make, and errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ollama
import pytest
from pydantic import BaseModel

from serving import Server, long_model, serving

MESSAGES = [{"role": "user", "content": "Hello there"}]
OPTIONS = {"temperature": 0, "num_predict": 12, "num_ctx": 8192}


class Answer(BaseModel):
    """What a structured response has."""

    yes: bool


@pytest.fixture(scope="module")
def client(tiny: Server) -> ollama.Client:
    return ollama.Client(host=tiny.url)


def test_the_model_is_listed_shown_and_loaded(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == "tiny"
    assert listed.details is not None
    shown = client.show("tiny:latest")
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    assert shown.details == listed.details
    assert (shown.template or "").startswith("{%- for m in messages %}")
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.context_length) == ("tiny", 65536)


def test_a_streamed_chat_has_the_text_and_counts_of_an_unstreamed_one(client: ollama.Client) -> None:
    whole = client.chat("tiny", MESSAGES, options=OPTIONS)
    pieces = list(client.chat("tiny", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert whole.message.content
    assert [piece.done for piece in pieces] == [*([False] * (len(pieces) - 1)), True]
    counts = [(each.done_reason, each.prompt_eval_count, each.eval_count) for each in (whole, pieces[-1])]
    assert counts[0] == counts[1]
    assert counts[0][2] == 12


def test_a_chat_is_that_of_chat_completions(client: ollama.Client, tiny: Server) -> None:
    (choice,) = tiny.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    ).json()["choices"]
    assert client.chat("tiny", MESSAGES, options=OPTIONS).message.content == choice["message"]["content"]


def test_a_format_is_enforced(client: ollama.Client) -> None:
    reply = client.chat(
        "tiny", MESSAGES, format=Answer.model_json_schema(), options={**OPTIONS, "num_predict": 64}
    )
    Answer.model_validate_json(reply.message.content or "")


def test_a_raw_completion_continues_its_prompt(client: ollama.Client, tiny: Server) -> None:
    made = client.generate("tiny", "Once upon", raw=True, options=OPTIONS)
    (choice,) = tiny.http.post(
        "/v1/completions", json={"prompt": "Once upon", "temperature": 0, "max_tokens": 12}
    ).json()["choices"]
    assert made.response == choice["text"]
    rendered = client.generate("tiny", "Once upon", options=OPTIONS)
    assert (rendered.prompt_eval_count or 0) > (made.prompt_eval_count or 0)


def test_embeddings_are_those_of_openais_route(client: ollama.Client, tiny: Server) -> None:
    made = client.embed("tiny", ["gravity", "levity"])
    body = tiny.http.post("/v1/embeddings", json={"input": ["gravity", "levity"]}).json()
    assert [list(vector) for vector in made.embeddings] == [each["embedding"] for each in body["data"]]
    assert list(client.embeddings("tiny", "gravity").embedding) == list(made.embeddings[0])


def test_errors_are_ollamas(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as unknown:
        client.chat("other", MESSAGES)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as invalid:
        client.chat("tiny", MESSAGES, options={"temperature": -1})
    assert invalid.value.status_code == 400


async def test_many_clients_at_once(tiny: Server) -> None:
    client = ollama.AsyncClient(host=tiny.url)
    replies = await asyncio.gather(*(client.chat("tiny", MESSAGES, options=OPTIONS) for _ in range(4)))
    assert len({reply.message.content for reply in replies}) == 1


def test_a_cached_model_is_pulled_at_once(tmp_path: Path) -> None:
    flags = ("--allow-model-management", "--num-kv-cells", "1024")
    with serving(tmp_path, str(long_model(tmp_path)), *flags, key="secret") as server:
        client = ollama.Client(host=server.url, headers={"authorization": "Bearer secret"})
        assert client.pull("smollm2").status == "success"
        assert [each.status for each in client.pull("smollm2", stream=True)][-1] == "success"
        assert client.list().models  # the server goes on serving its own model
