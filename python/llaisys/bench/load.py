"""Sends a workload on its schedule, and watches whether the client itself was in the way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llaisys.bench.client import Message, Target, send
from llaisys.bench.record import RequestRecord
from llaisys.bench.workload import Conversation

if TYPE_CHECKING:
    import aiohttp

LAG_INTERVAL_S = 0.01
LAG_MAX_MS = 10.0
CPU_SHARE_MAX = 0.8


@dataclass(slots=True)
class ClientOverhead:
    """What the client cost, and how late it was: a measurement is as good as its instrument.

    - `lags_s`: how much later than asked the event loop woke a sleeper. Any stamp may be as late as that.
    - `send_lags_s`: how much later than due a request was sent that had not to wait for a place.
    - `cpu_share`: CPU seconds of the process a second; near 1 it could do no more.
    """

    lags_s: list[float] = field(default_factory=list)
    send_lags_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0

    def report(self) -> dict[str, Any]:
        """Figures; `limited` is true where they should not be trusted."""
        lag_p99_ms = _p99_ms(self.lags_s)
        return {
            "cpu_share": self.cpu_share,
            "loop_lag_p99_ms": lag_p99_ms,
            "loop_lag_max_ms": 1e3 * max(self.lags_s, default=0.0),
            "send_lag_p99_ms": _p99_ms(self.send_lags_s),
            "limited": self.cpu_share > CPU_SHARE_MAX or lag_p99_ms > LAG_MAX_MS,
        }


@dataclass(slots=True)
class Run:
    """A run's records, in the order of their arrival, its length, and the client's part in it."""

    records: list[RequestRecord]
    duration_s: float
    overhead: ClientOverhead


async def run_load(
    session: aiohttp.ClientSession,
    target: Target,
    conversations: Sequence[Conversation],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> Run:
    """Starts each conversation when it is due (seconds from now), its turns one after another.

    Open loop: nobody waits for anybody. With `max_concurrency` so many conversations run at most, and who is
    due earlier goes first. `on_end` is called after each request.
    """
    places = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    overhead = ClientOverhead()
    with _quiet_collector():
        watch = asyncio.create_task(_watch_lag(overhead.lags_s))
        cpu_s, start_s = time.process_time(), time.perf_counter()

        async def converse(conversation: Conversation, at_s: float) -> list[RequestRecord]:
            async with places:
                return await _converse(session, target, conversation, at_s, on_end)

        tasks = []
        for conversation, offset_s in zip(conversations, due_s, strict=True):
            at_s = start_s + offset_s
            if (wait_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(converse(conversation, at_s)))
        answered = await asyncio.gather(*tasks)
        duration_s = time.perf_counter() - start_s
        overhead.cpu_share = (time.process_time() - cpu_s) / duration_s
        watch.cancel()
    records = [record for each in answered for record in each]
    if max_concurrency is None:
        overhead.send_lags_s = [each[0].queue_s for each in answered]
    return Run(records, duration_s, overhead)


async def _converse(
    session: aiohttp.ClientSession,
    target: Target,
    conversation: Conversation,
    due_s: float,
    on_end: Callable[[], object],
) -> list[RequestRecord]:
    """All turns; a turn that fails ends it, and the rest are not sent."""
    records: list[RequestRecord] = []
    messages: list[Message] = []
    for turn in conversation:
        record = RequestRecord(due_s=due_s if not records else time.perf_counter())
        records.append(record)
        if len(conversation) == 1:
            await send(session, target, turn.prompt, turn.output_len, record)
        else:
            messages.append({"role": "user", "content": str(turn.prompt)})
            await send(session, target, messages, turn.output_len, record)
            messages.append({"role": "assistant", "content": record.text})
        on_end()
        if record.error:
            break
    return records


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """What is alive now is not looked at by the garbage collector during the run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _watch_lag(lags_s: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags_s.append(time.perf_counter() - before_s - LAG_INTERVAL_S)


def _p99_ms(values_s: Sequence[float]) -> float:
    return float(1e3 * np.percentile(values_s, 99)) if values_s else 0.0
