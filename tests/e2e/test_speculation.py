"""Speculative decoding over HTTP and in `LLM`: the same text, and counts of what was drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from llaisys import LLM, SamplingParams
from llaisys.errors import UnsupportedError
from serving import Server, serving

CHAT = [{"role": "user", "content": "Write a sentence about the sea, and then the same sentence again."}]
FLAGS = ("--num-kv-cells", "4096", "--speculative-config", '{"method": "suffix"}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("speculative"), "smollm2", *FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def complete(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2", messages=CHAT, **{"max_tokens": 60, "temperature": 0.0, **more}
    )


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> Any:
    return complete(client)


def predicted(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def test_a_prediction_changes_no_text_and_is_counted(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None
    for prediction in (predicted(text), {"type": "content", "content": [{"type": "text", "text": text}]}):
        made = complete(client, prediction=prediction)
        assert made.choices[0].message.content == text
        assert made.usage.completion_tokens == plain.usage.completion_tokens
        details = made.usage.completion_tokens_details
        assert 0 < details.accepted_prediction_tokens < plain.usage.completion_tokens
        assert details.rejected_prediction_tokens >= 0


def test_a_stop_string_inside_a_draft_ends_the_text_there(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].message.content
    stop = text[len(text) // 2 :][:5]
    without = complete(client, stop=[stop])
    made = complete(client, stop=[stop], prediction=predicted(text))
    assert made.choices[0].message.content == without.choices[0].message.content
    assert made.choices[0].finish_reason == "stop"
    assert made.usage.completion_tokens == without.usage.completion_tokens


def test_a_stream_ends_with_the_counts_of_its_prediction(client: openai.OpenAI, plain: Any) -> None:
    text = plain.choices[0].message.content
    options = {"include_usage": True}
    chunks = [*complete(client, prediction=predicted(text), stream=True, stream_options=options)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_metrics_and_timeline_count_drafts(server: Server, client: openai.OpenAI, plain: Any) -> None:
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    made = complete(client, prediction=predicted(plain.choices[0].message.content))
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total") - before
    assert accepted > 0
    n_drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert n_drafted >= accepted
    assert server.metric("vllm:spec_decode_num_drafts_total") > 0
    by_position = server.samples("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert sum(by_position) == before + accepted
    (choice,) = server.http.get(f"/v1/requests/{made.id}/timeline").json()["choices"]
    assert choice["num_accepted_tokens"] == accepted
    assert choice["num_draft_tokens"] >= accepted


def test_llm_takes_a_prediction_only_with_speculation() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    with LLM("smollm2", num_kv_cells=2048, speculative_config=None) as llm:
        (plain,) = llm.chat([CHAT], params)
        with pytest.raises(UnsupportedError, match="no speculative decoding") as error:
            llm.chat([CHAT], SamplingParams(max_tokens=4, prediction="The sea"))
        assert error.value.param == "prediction"
    text = plain.outputs[0].text
    with LLM(
        "smollm2", num_kv_cells=2048, engine_process=True, speculative_config={"method": "ngram"}
    ) as llm:
        (made,) = llm.chat([CHAT], SamplingParams(max_tokens=40, temperature=0.0, prediction=text))
    assert made.outputs[0].token_ids == plain.outputs[0].token_ids
    assert 0 < made.usage.accepted_prediction_tokens < 40
