"""The HTTP API with the real `openai` client: completions, streams, usage, errors, probes, metrics."""

from __future__ import annotations

import re

import httpx
import openai
import pytest
from openai import OpenAI

from golden import Golden

pytestmark = pytest.mark.stage2
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tiny_server: str) -> OpenAI:
    return OpenAI(base_url=f"{tiny_server}/v1", api_key="EMPTY", max_retries=0)


def test_a_stream_adds_up_to_the_whole_completion(client: OpenAI) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "seed": 5}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    stream = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content
    assert stream[0].choices[0].delta.role == "assistant"
    assert stream[-1].choices == []
    assert stream[-1].usage is not None
    assert whole.usage is not None
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert stream[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == whole.choices[0].finish_reason
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_all_four_prompt_forms(client: OpenAI, golden: Golden) -> None:
    ids = golden.prompts[1]
    for prompt, n in (("def f", 1), (["def f", "def g"], 2), (ids, 1), ([ids, ids[:3]], 2)):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(n))


def test_models_are_listed_with_their_length(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny"
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == 512
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_are_openais(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)  # type: ignore[arg-type]
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[1] * 600, max_tokens=4)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as many:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=9)  # type: ignore[arg-type]
    assert many.value.param == "n"


def test_sse_to_the_byte(tiny_server: str) -> None:
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    answer = httpx.post(f"{tiny_server}/v1/chat/completions", json=body, timeout=None)
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    assert frames[-1] == "data: [DONE]"
    assert answer.text.count("[DONE]") == 1


def test_probes_and_metrics(tiny_server: str, client: OpenAI) -> None:
    for probe in ("/livez", "/health", "/ready"):
        assert httpx.get(tiny_server + probe, timeout=None).status_code == 200

    def counter(name: str) -> float:
        text = httpx.get(f"{tiny_server}/metrics", timeout=None).text
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.M))

    before = counter("vllm:generation_tokens_total")
    answer = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert counter("vllm:generation_tokens_total") - before == answer.usage.completion_tokens == 9
    assert counter("vllm:num_requests_running") == counter("vllm:num_requests_waiting") == 0
    assert counter("vllm:time_to_first_token_seconds_count") >= 1


def test_ignored_fields_are_named(tiny_server: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1, "flavour": "mint"}
    answer = httpx.post(f"{tiny_server}/v1/chat/completions", json=body, timeout=None)
    assert answer.status_code == 200
    assert answer.headers["x-llaisys-ignored-fields"] == "flavour"
