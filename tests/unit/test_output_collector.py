"""RequestOutputCollector: merging, the byte limit, and one error at the end."""

from __future__ import annotations

import asyncio

import pytest

from llaisys.errors import RequestFailedError
from llaisys.output_collector import COLLECTOR_BYTES_MAX, RequestOutputCollector
from llaisys.outputs import CompletionOutput, Logprob, RequestOutput
from llaisys.server.completion_builder import chat_logprobs
from llaisys.server.http_errors import to_json


def delta(
    text: str,
    ids: list[int] | None = None,
    *,
    finished: bool = False,
    logprobs: list[dict[int, Logprob]] | None = None,
) -> RequestOutput:
    reason = "stop" if finished else None
    answer = CompletionOutput(0, text, ids or [], logprobs=list(logprobs or ()) or None, finish_reason=reason)
    return RequestOutput("r", None, [1], [answer], finished=finished)


async def test_late_deltas_are_merged() -> None:
    collector = RequestOutputCollector()
    for i in range(5):
        assert collector.put(delta(f"{i}", [i], finished=i == 4))
    taken = await collector.get()
    assert (taken.outputs[0].text, taken.outputs[0].token_ids, taken.finished) == (
        "01234",
        [0, 1, 2, 3, 4],
        True,
    )


async def test_a_reader_waits_for_output() -> None:
    collector = RequestOutputCollector()
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    assert not reader.done()
    collector.put(delta("a"))
    assert (await reader).outputs[0].text == "a"


async def test_undelivered_bytes_are_bounded_and_a_lone_delta_always_fits() -> None:
    collector = RequestOutputCollector()
    assert collector.put(delta("x" * (COLLECTOR_BYTES_MAX + 1)))
    assert not collector.put(delta("y"))
    await collector.get()
    assert collector.put(delta("y" * 100))
    await collector.get()
    assert collector.put(delta("x" * (COLLECTOR_BYTES_MAX - 100)))
    assert not collector.put(delta("", [7]))
    assert collector.put(delta(""))
    assert (await collector.get()).outputs[0].token_ids == []


@pytest.mark.parametrize("text", ["a", "天", "🌞", "\x01", "\n"])
@pytest.mark.parametrize("n_top", [None, 0, 20])
async def test_the_limit_counts_the_bytes_that_a_client_receives(text: str, n_top: int | None) -> None:
    collector, wire = RequestOutputCollector(), 0
    logprobs = None
    if n_top is not None:
        logprobs = [{i: Logprob(-1.2345678901234567e-05, 1, text) for i in range(max(n_top, 1))}]
    while collector.put(delta(text, [1], logprobs=logprobs)):
        wire += len(to_json(text)) - 2
        if logprobs is not None:
            wire += len(to_json(chat_logprobs([0], logprobs, n_top or 0)["content"])) - 1
    assert wire <= COLLECTOR_BYTES_MAX
    assert wire >= COLLECTOR_BYTES_MAX / 16, "otherwise readers that are not slow would fail"


async def test_a_delta_in_delivery_counts_until_the_next_get() -> None:
    collector = RequestOutputCollector()
    half = "x" * (COLLECTOR_BYTES_MAX // 2)
    for _ in range(3):
        assert collector.put(delta(half))
        await collector.get()
        assert collector.put(delta(half[1:]))
        assert not collector.put(delta("xx"))
        assert collector.put(delta("x"))
        assert (await collector.get()).outputs[0].text == half


async def test_an_error_follows_the_undelivered_delta() -> None:
    collector = RequestOutputCollector()
    collector.put(delta("a"))
    collector.fail(RequestFailedError("row"))
    assert (await collector.get()).outputs[0].text == "a"
    with pytest.raises(RequestFailedError, match="row"):
        await collector.get()


async def test_without_merging_deltas_are_delivered_one_by_one() -> None:
    collector = RequestOutputCollector(merges=False)
    for i in range(3):
        assert collector.put(delta("x" * COLLECTOR_BYTES_MAX, [i]))
    collector.fail(RequestFailedError("no"))
    assert [(await collector.get()).outputs[0].token_ids for _ in range(3)] == [[0], [1], [2]]
    assert collector.num_bytes == 0
    with pytest.raises(RequestFailedError):
        await collector.get()


async def test_a_reader_lags_from_the_first_late_delta_until_the_next_get() -> None:
    now_s = 0.0
    collector = RequestOutputCollector(lambda: now_s)
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    now_s = 1.0
    collector.put(delta("a"))
    collector.put(delta("b"))  # the loop was blocked, not the reader
    await reader
    assert collector.lags() == []
    now_s = 2.0
    collector.put(delta("c"))
    now_s = 3.0
    collector.put(delta("d"))
    assert collector.lags() == [(2.0, 3.0)]
    now_s = 5.0
    await collector.get()
    assert collector.lags() == [(2.0, 5.0)]
    collector.fail(RequestFailedError("row"))
    now_s = 6.0
    assert collector.lags() == [(2.0, 5.0), (5.0, 6.0)]
