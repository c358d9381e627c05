"""Merging several streams: order within each stream, errors, and closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from llaisys.outputs import CompletionOutput, RequestOutput
from llaisys.server.streaming import merge_streams

CLOSED: list[str] = []


def delta(text: str) -> RequestOutput:
    return RequestOutput("r", None, [], [CompletionOutput(0, text, [])], finished=False)


async def plays(
    name: str, *texts: str, hangs: bool = False, error: Exception | None = None
) -> AsyncIterator[RequestOutput]:
    try:
        for text in texts:
            await asyncio.sleep(0)
            yield delta(text)
        if hangs:
            await asyncio.Event().wait()
        if error is not None:
            raise error
    finally:
        CLOSED.append(name)


@pytest.fixture(autouse=True)
def _nothing_closed() -> None:
    CLOSED.clear()


async def collected(*streams: AsyncIterator[RequestOutput]) -> dict[int, str]:
    texts: dict[int, str] = {}
    async for index, item in merge_streams(streams):
        texts[index] = texts.get(index, "") + item.outputs[0].text
    return texts


async def test_deltas_of_each_stream_keep_their_order() -> None:
    assert await collected(plays("a", "1", "2", "3")) == {0: "123"}
    assert await collected(plays("a", "1", "2"), plays("b"), plays("c", "3", "4", "5")) == {0: "12", 2: "345"}
    assert sorted(CLOSED) == ["a", "a", "b", "c"]


@pytest.mark.parametrize("n_others", [0, 2])
async def test_the_first_error_ends_all_streams(n_others: int) -> None:
    others = [plays(f"o{i}", "x", hangs=True) for i in range(n_others)]
    with pytest.raises(ValueError, match="broken"):
        await collected(plays("bad", "1", error=ValueError("broken")), *others)
    assert len(CLOSED) == 1 + n_others


@pytest.mark.parametrize("n_streams", [1, 3])
async def test_closing_closes_every_stream(n_streams: int) -> None:
    streams = [plays(str(i), "x", hangs=True) for i in range(n_streams)]
    async with aclosing(merge_streams(streams)) as deltas:
        async for _ in deltas:
            break
    # Streams that never started have nothing to close.
    assert len(CLOSED) >= 1
    assert len([t for t in asyncio.all_tasks() if t is not asyncio.current_task()]) == 0
