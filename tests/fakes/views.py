"""Requests in any state, and the scheduler's plans for them."""

from __future__ import annotations

from typing import Any

from fakes.asks import ask, limits
from llaisys.engine.limits import Limits, token_limit
from llaisys.engine.request import Admitted, Request, advance
from llaisys.engine.request_queue import WaitingQueue, queue_key
from llaisys.engine.scheduler import Scheduler, SchedulerOutput, SchedulerView

NOW = 1000.0
schedule = Scheduler().schedule


def request(
    ordinal: int, n_prompt: int = 3, *, computed: int = -1, output: int = 0, **changes: Any
) -> Request:
    """Return a waiting request, or a running one if `computed` or `output` is set.

    Other settings: `stream`, `preempted` (a count), `last_step`, and the fields of `ask`.
    """
    stream, n_preempted = changes.pop("stream", 0), changes.pop("preempted", 0)
    last_step = changes.pop("last_step", -1)
    source = ask(f"{ordinal}", [1] * n_prompt, **changes)
    limit = token_limit([1] * n_prompt, source.params, limits())
    made = Request(source, ordinal=ordinal, seed=0, token_limit=limit)
    made.token_ids.extend([2] * output)
    made.num_preempted, made.last_step = n_preempted, last_step
    if computed >= 0 or output:
        made.state = advance(made.state, Admitted(ordinal, stream))
        made.num_computed = computed if computed >= 0 else n_prompt + output - 1
    return made


def view_of(
    waiting: list[Request], running: list[Request], bounds: Limits | None = None, **more: Any
) -> SchedulerView:
    bounds = bounds or limits()
    queue = WaitingQueue()
    for each in waiting:
        queue.add(each)
    n_free = [bounds.n_cells_per_stream] * bounds.n_streams
    for each in running:
        n_free[each.state.stream] -= each.num_computed  # type: ignore[union-attr]
    facts = {"now_s": NOW, "n_free": tuple(n_free), "last_cleanup_s": NOW, **more}
    return SchedulerView(waiting=queue, running=sorted(running, key=queue_key), limits=bounds, **facts)


def planned(
    waiting: list[Request], running: list[Request], bounds: Limits | None = None, **more: Any
) -> SchedulerOutput:
    return schedule(view_of(waiting, running, bounds, **more))
