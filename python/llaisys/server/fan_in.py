"""Several streams of deltas read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeAlias, cast

from llaisys.types import RequestOutput

Deltas: TypeAlias = AsyncIterator[RequestOutput]
_Item: TypeAlias = RequestOutput | Exception | None


async def fan_in(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yields (index of the stream, delta) as they come; each stream's own order is kept.

    The first error ends all. Closing this iterator closes every stream before it returns, which cancels
    their requests.
    """
    if len(streams) == 1:
        async with _closing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, _Item]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    n_open = len(streams)
    try:
        while n_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_open -= 1
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, stream: Deltas, queue: asyncio.Queue[tuple[int, _Item]]) -> None:
    """Puts a stream into the queue, then its error, or None at its good end. Nothing after a cancellation."""
    end: Exception | None = None
    try:
        async with _closing(stream) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as e:  # noqa: BLE001 -- raised again by the reader
        end = e
    await queue.put((index, end))


def _closing(stream: Deltas) -> aclosing[AsyncGenerator[RequestOutput, None]]:
    """`generate` promises an iterator; it is a generator, and closing it is what cancels the request."""
    return aclosing(cast("AsyncGenerator[RequestOutput, None]", stream))
