"""AsyncLLM.generate with vLLM's arguments: output kinds, prompt forms, logprobs of the whole vocabulary."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fakes import core, text
from llaisys import AsyncLLM, Config, RequestOutput, RequestOutputKind, SamplingParams, UnsupportedError
from llaisys.errors import QueueFullError, RejectedError

PROMPT = [1, 2, 3]
pytestmark = pytest.mark.usefixtures("fake_model")


@pytest_asyncio.fixture
async def service(fake_model: object) -> AsyncIterator[AsyncLLM]:  # noqa: ARG001 -- its effect is needed
    started = await AsyncLLM.start(Config(num_kv_cells=512, max_logprobs=-1))
    yield started
    await started.close()


async def outputs_of(
    service: AsyncLLM, prompt: Any = PROMPT, options: dict[str, Any] | None = None, **params: Any
) -> list[RequestOutput]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 10, **params})
    return [output async for output in service.generate(prompt, sampling, "a", **(options or {}))]


async def test_outputs_are_cumulative_by_default(service: AsyncLLM) -> None:
    outputs = await outputs_of(service, logprobs=0)
    ids = core.answer(PROMPT, 10)
    seen = [output.outputs[0].token_ids for output in outputs]
    assert all(tokens == ids[: len(tokens)] for tokens in seen), "each output has everything so far"
    assert [len(tokens) for tokens in seen] == sorted({len(tokens) for tokens in seen})
    assert seen[-1] == ids
    for output in outputs:
        (choice,) = output.outputs
        assert text.tokenizer().decode(choice.token_ids, True).startswith(choice.text)
        assert [next(iter(step)) for step in choice.logprobs or ()] == choice.token_ids
        assert output.usage.completion_tokens == len(choice.token_ids)
    assert outputs[-1].outputs[0].text == text.tokenizer().decode(ids, True)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_outputs_have_the_times_of_their_request(service: AsyncLLM) -> None:
    before, before_s = time.time(), time.monotonic()
    for kind in RequestOutputKind:
        outputs = await outputs_of(service, output_kind=kind, n=2)
        assert len({id(output.metrics) for output in outputs}) == 1
        metrics = outputs[-1].metrics
        assert metrics is not None
        assert metrics.num_generation_tokens == 20
        assert before <= metrics.arrival_time <= time.time()
        times = [metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        times = [before_s, *times, time.monotonic()]
        assert times == sorted(times)
        assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts


async def test_the_final_output_alone(service: AsyncLLM) -> None:
    (output,) = await outputs_of(service, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    assert output.finished
    assert [choice.token_ids for choice in output.outputs] == [core.answer(PROMPT, 10)] * 2


async def test_deltas_join_to_the_completion(service: AsyncLLM) -> None:
    outputs = await outputs_of(service, output_kind=RequestOutputKind.DELTA)
    assert [i for output in outputs for i in output.outputs[0].token_ids] == core.answer(PROMPT, 10)


async def test_without_detokenize_the_text_is_empty(service: AsyncLLM) -> None:
    outputs = await outputs_of(service, detokenize=False)
    assert outputs[-1].outputs[0].token_ids == core.answer(PROMPT, 10)
    assert {output.outputs[0].text for output in outputs} == {""}


async def test_prompt_objects_of_vllm(service: AsyncLLM) -> None:
    ids = text.tokenizer().encode("hi", True)
    for prompt, shown in (
        ("hi", "hi"),
        ({"prompt": "hi"}, "hi"),
        ({"prompt_token_ids": ids}, None),
        ({"prompt_token_ids": ids, "prompt": "hi"}, "hi"),
        (ids, None),
    ):
        output = (await outputs_of(service, prompt))[-1]
        assert (output.prompt, output.prompt_token_ids) == (shown, ids)
        assert output.outputs[0].token_ids == core.answer(ids, 10)
    with pytest.raises(RejectedError, match="prompt_token_ids"):
        await outputs_of(service, {"text": "hi"})
    with pytest.raises(UnsupportedError, match="multi_modal_data") as caught:
        await outputs_of(service, {"prompt": "hi", "multi_modal_data": {"image": 1}})
    assert caught.value.param == "multi_modal_data"


async def test_arguments_of_vllm_without_a_meaning_here(service: AsyncLLM) -> None:
    for name in ("tokenization_kwargs", "trace_headers"):
        assert (await outputs_of(service, options={name: None}))[-1].finished
        with pytest.raises(UnsupportedError, match=name):
            await outputs_of(service, options={name: {"x": "y"}})
    params = SamplingParams(temperature=0.0, max_tokens=2)
    stream = service.generate(prompt=PROMPT, sampling_params=params, request_id="b", priority=3)
    assert [output async for output in stream][-1].outputs[0].token_ids == core.answer(PROMPT, 2)


async def test_logprobs_of_the_whole_vocabulary(service: AsyncLLM) -> None:
    """They may exceed the bound of a slow reader, but a delta has one token."""
    kind = RequestOutputKind.DELTA
    outputs = await outputs_of(service, max_tokens=100, logprobs=-1, output_kind=kind)
    steps = [output.outputs[0].logprobs or [] for output in outputs]
    assert [len(step) for step in steps] == [1] * 100
    assert all(step[0].keys() == {*range(core.VOCAB_SIZE)} for step in steps)


async def test_the_logprobs_of_all_open_requests_are_bounded(
    service: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = SamplingParams(temperature=0.0, max_tokens=100, logprobs=-1, prompt_logprobs=-1)
    n_entries = (100 + len(PROMPT)) * (core.VOCAB_SIZE + 1)
    monkeypatch.setattr("llaisys.async_llm.LOGPROBS_OPEN_MAX", n_entries - 1)
    first = service.generate(PROMPT, many, "first")
    await anext(first)  # a single request is always accepted
    with pytest.raises(QueueFullError, match=f"open requests have {n_entries} logprobs"):
        await anext(service.generate(PROMPT, many, "second"))
    assert (await outputs_of(service, logprobs=20, prompt_logprobs=20))[-1].finished
    await first.aclose()  # type: ignore[attr-defined]
    assert [output async for output in service.generate(PROMPT, many, "third")][-1].finished
    monkeypatch.setattr("llaisys.async_llm.LOGPROBS_OPEN_MAX", 2 * n_entries)
    streams = [service.generate(PROMPT, many, f"{i}") for i in range(3)]
    for stream in streams[:2]:
        await anext(stream)
    with pytest.raises(QueueFullError):
        await anext(streams[2])
    for stream in streams[:2]:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_reset_prefix_cache(service: AsyncLLM) -> None:
    assert (await outputs_of(service))[-1].num_cached_tokens == 0
    assert (await outputs_of(service))[-1].num_cached_tokens == 2
    assert await service.reset_prefix_cache()
    assert (await outputs_of(service))[-1].num_cached_tokens == 0
