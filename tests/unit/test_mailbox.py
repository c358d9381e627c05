"""A stream's mailbox: coalescing, bounded, one error at the end."""

from __future__ import annotations

import asyncio

import pytest

from llaisys.errors import RequestFailedError
from llaisys.mailbox import MAILBOX_BYTES_MAX, Mailbox
from llaisys.server.errors import to_json
from llaisys.server.logprobs import chat_logprobs
from llaisys.types import CompletionOutput, Logprob, RequestOutput


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
    assert mailbox.put(delta("y" * 100))
    await mailbox.take()
    assert mailbox.put(delta("x" * (MAILBOX_BYTES_MAX - 100)))
    assert not mailbox.put(delta("", [7]))
    assert mailbox.put(delta(""))
    assert (await mailbox.take()).outputs[0].token_ids == []


@pytest.mark.parametrize("text", ["a", "天", "🌞", "\x01", "\n"])
@pytest.mark.parametrize("n_top", [None, 0, 20])
async def test_the_bound_is_of_the_bytes_that_a_client_gets(text: str, n_top: int | None) -> None:
    mailbox, wire = Mailbox(), 0
    logprobs = None
    if n_top is not None:
        logprobs = [{i: Logprob(-1.2345678901234567e-05, 1, text) for i in range(max(n_top, 1))}]
    while mailbox.put(delta(text, [1], logprobs=logprobs)):
        wire += len(to_json(text)) - 2
        if logprobs is not None:
            wire += len(to_json(chat_logprobs([0], logprobs, n_top or 0)["content"])) - 1
    assert wire <= MAILBOX_BYTES_MAX
    assert wire >= MAILBOX_BYTES_MAX / 16, "it would end readers that are not slow"


async def test_what_is_on_its_way_counts_until_the_reader_comes_back() -> None:
    mailbox = Mailbox()
    half = "x" * (MAILBOX_BYTES_MAX // 2)
    for _ in range(3):
        assert mailbox.put(delta(half))
        await mailbox.take()
        assert mailbox.put(delta(half[1:]))
        assert not mailbox.put(delta("xx"))
        assert mailbox.put(delta("x"))
        assert (await mailbox.take()).outputs[0].text == half


async def test_an_error_comes_after_what_is_held() -> None:
    mailbox = Mailbox()
    mailbox.put(delta("a"))
    mailbox.fail(RequestFailedError("row"))
    assert (await mailbox.take()).outputs[0].text == "a"
    with pytest.raises(RequestFailedError, match="row"):
        await mailbox.take()
