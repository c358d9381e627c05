"""A stream's mailbox: coalescing, bounded, one error at the end."""

from __future__ import annotations

import asyncio

import pytest

from llaisys.errors import RequestFailedError
from llaisys.mailbox import MAILBOX_BYTES_MAX, Mailbox
from llaisys.types import CompletionOutput, Logprob, RequestOutput


def delta(
    text: str, ids: list[int] | None = None, *, finished: bool = False, n_logprobs: int = 0
) -> RequestOutput:
    logprobs = [{i: Logprob(-1.0) for i in range(n_logprobs)}] if n_logprobs else None
    answer = CompletionOutput(
        0, text, ids or [], logprobs=logprobs, finish_reason="stop" if finished else None
    )
    return RequestOutput("r", None, [1], [answer], finished=finished)


async def test_late_deltas_are_joined() -> None:
    mailbox = Mailbox()
    for i in range(5):
        assert mailbox.put(delta(f"{i}", [i], finished=i == 4))
    taken = await mailbox.take()
    assert (taken.outputs[0].text, taken.outputs[0].token_ids, taken.finished) == (
        "01234",
        [0, 1, 2, 3, 4],
        True,
    )


async def test_a_reader_waits_for_news() -> None:
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not reader.done()
    mailbox.put(delta("a"))
    assert (await reader).outputs[0].text == "a"


async def test_the_bound_is_kept_and_a_lone_delta_always_fits() -> None:
    mailbox = Mailbox()
    assert mailbox.put(delta("x" * (MAILBOX_BYTES_MAX + 1)))
    assert not mailbox.put(delta("y"))
    await mailbox.take()
    assert mailbox.put(delta("x" * MAILBOX_BYTES_MAX))
    assert not mailbox.put(delta("", [7]))
    assert mailbox.put(delta(""))
    assert (await mailbox.take()).outputs[0].token_ids == []


async def test_logprobs_weigh() -> None:
    mailbox = Mailbox()
    n_put = 0
    while mailbox.put(delta("a", [1], n_logprobs=20)):
        n_put += 1
    assert 150 < n_put < 250


async def test_an_error_comes_after_what_is_held() -> None:
    mailbox = Mailbox()
    mailbox.put(delta("a"))
    mailbox.fail(RequestFailedError("row"))
    assert (await mailbox.take()).outputs[0].text == "a"
    with pytest.raises(RequestFailedError, match="row"):
        await mailbox.take()


async def test_a_reader_lags_from_the_first_late_piece_until_it_is_back() -> None:
    now_s = 0.0
    mailbox = Mailbox(lambda: now_s)
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    now_s = 1.0
    mailbox.put(delta("a"))
    mailbox.put(delta("b"))  # the loop was held up, not the reader
    await reader
    assert mailbox.lags() == []
    now_s = 2.0
    mailbox.put(delta("c"))
    now_s = 3.0
    mailbox.put(delta("d"))
    assert mailbox.lags() == [(2.0, 3.0)]
    now_s = 5.0
    await mailbox.take()
    assert mailbox.lags() == [(2.0, 5.0)]
    mailbox.fail(RequestFailedError("row"))
    now_s = 6.0
    assert mailbox.lags() == [(2.0, 5.0), (5.0, 6.0)]
