"""Choices, echoes and prompt logprobs with the official client: a stream equals the whole completion."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types import Completion

from llaisys.engine.worker import inspect_model
from llaisys.text.tokenizer import Tokenizer, load_tokenizer
from serving import GOLDENS, Server, long_model, serving

PROMPT = [5, 60, 7, 200, 31, 8]
FLAGS = ("--num-kv-cells", "8192", "--max-num-seqs", "12", "--dtype", "float32")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model with capacity for several choices at the same time."""
    folder = tmp_path_factory.mktemp("wide")
    with serving(folder, str(long_model(folder)), *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def client(wide: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{wide.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(inspect_model(GOLDENS / "qwen2-tied-bf16"))


def request_fields(**more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 12, "seed": 11, "temperature": 1.0, **more}
    extra = {"ignore_eos": True, **body.pop("extra_body", {})}
    return {**body, "extra_body": extra}


def complete(client: openai.OpenAI, **more: Any) -> Completion:
    response: Completion = client.completions.create(**request_fields(**more))
    return response


def streamed(client: openai.OpenAI, **more: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """Return the sum of a stream by choice, and its usage."""
    made: dict[int, dict[str, Any]] = {}
    usage = None
    stream = client.completions.create(
        stream=True, stream_options={"include_usage": True}, **request_fields(**more)
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            one = made.setdefault(choice.index, {"text": "", "logprobs": {}, "end": None})
            assert one["end"] is None, "a chunk after the choice's end"
            one["text"] += choice.text
            one["end"] = choice.finish_reason
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                one["logprobs"].setdefault(name, []).extend(values)
    return made, usage


def collected(response: Completion) -> dict[int, dict[str, Any]]:
    return {
        choice.index: {
            "text": choice.text,
            "logprobs": choice.logprobs.model_dump() if choice.logprobs else {},
            "end": choice.finish_reason,
        }
        for choice in response.choices
    }


@pytest.mark.parametrize(
    ("body", "n_choices"),
    [
        ({"prompt": "Hello", "n": 3}, 3),
        ({"prompt": ["Hello", "日本語 🙂"], "n": 2, "logprobs": 2}, 4),
        ({"prompt": [PROMPT, [9]], "n": 2, "echo": True}, 4),
        ({"prompt": "Hello 🙂", "n": 2, "echo": True, "logprobs": 1}, 2),
        ({"prompt": PROMPT, "echo": True, "logprobs": 0, "extra_body": {"truncate_prompt_tokens": 3}}, 1),
        ({"prompt": PROMPT, "n": 8, "best_of": 8, "max_tokens": 3}, 8),
    ],
)
def test_a_stream_adds_up_to_the_whole_completion(
    client: openai.OpenAI, body: dict[str, Any], n_choices: int
) -> None:
    whole = complete(client, **body)
    pieces, usage = streamed(client, **body)
    assert pieces == collected(whole)
    assert sorted(pieces) == list(range(n_choices))
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(pieces) * body.get("max_tokens", 12)
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_streamed_chat_choices_equal_the_whole_completion(client: openai.OpenAI) -> None:
    body = request_fields(
        messages=[{"role": "user", "content": "Hello there"}], n=3, logprobs=True, top_logprobs=2
    )
    whole = client.chat.completions.create(**body)
    texts, ends, tokens = dict.fromkeys(range(3), ""), {}, {i: [] for i in range(3)}  # type: ignore[var-annotated]
    for chunk in client.chat.completions.create(stream=True, **body):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += (choice.logprobs and choice.logprobs.content) or []
        ends[choice.index] = choice.finish_reason
    assert [choice.message.content for choice in whole.choices] == list(texts.values())
    assert [choice.logprobs.content for choice in whole.choices] == list(tokens.values())
    assert ends == dict.fromkeys(range(3), "length")
    assert len(set(texts.values())) == 3, "each choice is sampled with its own random numbers"


def test_a_stop_string_ends_one_choice_only(client: openai.OpenAI) -> None:
    plain = complete(client, prompt=PROMPT, n=3, max_tokens=24)
    texts = [choice.text for choice in plain.choices]
    stop = next(
        text[i : i + 2]
        for text in texts
        for i in range(3, len(text) - 2)
        if sum(text[i : i + 2] in other for other in texts) == 1
    )
    cut = complete(client, prompt=PROMPT, n=3, max_tokens=24, stop=stop)
    assert [choice.text for choice in cut.choices] == [text.split(stop)[0] for text in texts]
    assert sorted(choice.finish_reason for choice in cut.choices) == ["length", "length", "stop"]
    assert streamed(client, prompt=PROMPT, n=3, max_tokens=24, stop=stop)[0] == collected(cut)
    assert cut.usage is not None
    assert plain.usage is not None
    assert cut.usage.completion_tokens < plain.usage.completion_tokens == 72


def test_streams_of_choices_never_cross(client: openai.OpenAI) -> None:
    """With more choices than batch slots, each equals the choice of a request alone."""
    bodies = [{"prompt": [10 + i, 20 + i, 30], "n": 1 + i % 4, "seed": i} for i in range(16)]
    alone = [collected(complete(client, **body)) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: streamed(client, **body)[0], bodies))
    assert together == alone


def test_too_many_choices_are_rejected(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=PROMPT, n=9)
    assert caught.value.param == "n"


def test_a_scored_prompt_has_the_logprobs_of_its_generation(client: openai.OpenAI) -> None:
    """Prompt and completion sent as a prompt get the same logprobs, bit for bit, from chunks of rows."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 200, "logprobs": 3}
    made = complete(client, **body, extra_body={"return_token_ids": True}).choices[0]
    assert made.model_extra is not None
    assert made.logprobs is not None
    ids = made.model_extra["token_ids"]
    scored = complete(client, prompt=[*PROMPT, *ids], max_tokens=1, extra_body={"prompt_logprobs": 3})
    entries = (scored.choices[0].model_extra or {})["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(PROMPT) + len(ids)
    for token_id, entry, logprob in zip(
        ids, entries[len(PROMPT) :], made.logprobs.token_logprobs or (), strict=True
    ):
        assert entry[str(token_id)]["logprob"] == logprob
        assert entry[str(token_id)]["rank"] == 1
        assert [each["rank"] for each in entry.values()] == [1, 2, 3]
    echoed = complete(client, prompt=[*PROMPT, *ids], max_tokens=1, echo=True, logprobs=0).choices[0]
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[len(PROMPT) : -1] == made.logprobs.token_logprobs


def test_requested_ids_have_the_logprobs_that_they_have_among_the_best(client: openai.OpenAI) -> None:
    def tops(**more: Any) -> list[dict[str, float]]:
        extra = {"return_tokens_as_token_ids": True, **more}
        made = complete(client, prompt=PROMPT, logprobs=3, extra_body=extra).choices[0].logprobs
        assert made is not None
        return made.top_logprobs or []

    best = tops()
    ids = [int(name.removeprefix("token_id:")) for name in best[0]]
    named = tops(logprob_token_ids=ids)
    assert named[0] == best[0]
    assert all(set(best[0]) <= set(each) for each in named)
    for wrong, says in ((list(range(21)), "21 ids"), ([1 << 20], f"token id {1 << 20}")):
        with pytest.raises(openai.BadRequestError, match=says) as caught:
            tops(logprob_token_ids=wrong)
        assert caught.value.param == "logprob_token_ids"


def test_only_allowed_ids_are_sampled(client: openai.OpenAI) -> None:
    body = {"allowed_token_ids": [17, 42, 99], "return_token_ids": True}
    response = complete(client, prompt=PROMPT, n=2, max_tokens=30, extra_body=body)
    ids = [(choice.model_extra or {})["token_ids"] for choice in response.choices]
    assert set(ids[0]) | set(ids[1]) == {17, 42, 99}
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=PROMPT, extra_body={"allowed_token_ids": [70_000]})
    assert caught.value.param == "allowed_token_ids"


def test_a_bad_word_is_not_sampled(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    def ids(**more: Any) -> list[int]:
        body = {"return_token_ids": True, **more}
        response = complete(client, prompt=PROMPT, temperature=0, max_tokens=40, extra_body=body)
        made: list[int] = (response.choices[0].model_extra or {})["token_ids"]
        return made

    def holds(whole: list[int], part: list[int]) -> bool:
        return any(whole[i : i + len(part)] == part for i in range(len(whole)))

    plain = ids()
    pairs = [tokenizer.decode(plain[i : i + 2], False) for i in range(39)]
    word, part = next(
        (text, tokenizer.encode(text, False))
        for i, text in enumerate(pairs)
        if text.strip() == text and tokenizer.encode(text, False) == plain[i : i + 2]
    )
    assert holds(plain, part)
    assert not holds(ids(bad_words=[word]), part)


def test_truncate_prompt_tokens_keeps_the_end_of_the_prompt(client: openai.OpenAI) -> None:
    cut = complete(client, prompt=PROMPT, extra_body={"truncate_prompt_tokens": 2})
    assert cut.usage is not None
    assert cut.usage.prompt_tokens == 2
    assert cut.choices[0].text == complete(client, prompt=PROMPT[-2:]).choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt=[5] * 9000)
    assert caught.value.code == "context_length_exceeded"
    whole = complete(client, prompt=[5] * 9000, max_tokens=2, extra_body={"truncate_prompt_tokens": -1})
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 8190


def test_an_open_request_id_cannot_be_used_again(client: openai.OpenAI) -> None:
    body = request_fields(prompt=PROMPT, max_tokens=8000, extra_body={"request_id": "mine"})
    with client.completions.create(stream=True, **body) as stream:
        assert next(iter(stream)).id == "cmpl-mine"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**body)
    assert caught.value.param == "request_id"
