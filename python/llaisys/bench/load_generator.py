"""Sends a workload on schedule, and measures whether the client itself was a bottleneck."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llaisys.bench.http_client import Message, Target, send
from llaisys.bench.request_record import RequestRecord
from llaisys.bench.workload import Conversation
from llaisys.interpreter import responsive_interpreter

if TYPE_CHECKING:
    import aiohttp

LAG_INTERVAL_S = 0.01
LAG_MAX_MS = 10.0
CPU_SHARE_MAX = 0.8


@dataclass(slots=True)
class ClientOverhead:
    """The client's load and lag, which bound the accuracy of a measurement.

    - `lags_s`: delays of the event loop's timers. Any timestamp may be late by as much.
    - `send_lags_s`: delays of requests that did not have to wait for `--max-concurrency`.
    - `cpu_share`: CPU seconds of the process per second; close to 1 it is saturated.
    """

    lags_s: list[float] = field(default_factory=list)
    send_lags_s: list[float] = field(default_factory=list)
    cpu_share: float = 0.0

    def report(self) -> dict[str, Any]:
        """Return the overhead as metrics; `limited` is true if the results are not reliable."""
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
    """The records of a run in the order of arrival, its duration, and the client's overhead."""

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
    """Start each conversation at its due time (seconds from now) and send its turns one after another.

    Open loop: conversations do not wait for each other. With `max_concurrency`, at most that many run at a
    time, in the order of their due times. `on_end` is called after each request.
    """
    slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    overhead = ClientOverhead()
    with responsive_interpreter():
        watch = asyncio.create_task(_watch_lag(overhead.lags_s))
        cpu_s, start_s = time.process_time(), time.perf_counter()

        async def converse(conversation: Conversation, at_s: float) -> list[RequestRecord]:
            async with slots:
                return await _converse(session, target, conversation, at_s, on_end)

        tasks = []
        for conversation, offset_s in zip(conversations, due_s, strict=True):
            at_s = start_s + offset_s
            if (wait_s := at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(converse(conversation, at_s)))
        results = await asyncio.gather(*tasks)
        duration_s = time.perf_counter() - start_s
        overhead.cpu_share = (time.process_time() - cpu_s) / duration_s
        watch.cancel()
    records = [record for each in results for record in each]
    if max_concurrency is None:
        overhead.send_lags_s = [each[0].queue_s for each in results]
    return Run(records, duration_s, overhead)


async def _converse(
    session: aiohttp.ClientSession,
    target: Target,
    conversation: Conversation,
    due_s: float,
    on_end: Callable[[], object],
) -> list[RequestRecord]:
    """Send all turns of a conversation; a failed turn ends it."""
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


async def _watch_lag(lags_s: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags_s.append(time.perf_counter() - before_s - LAG_INTERVAL_S)


def _p99_ms(values_s: Sequence[float]) -> float:
    return float(1e3 * np.percentile(values_s, 99)) if values_s else 0.0
