"""Who runs in the next step, and with how many tokens. Pure: a view in, a plan out; no clock, no I/O.

There is no prefill phase and no decode phase: a request has computed some of its tokens, and a step lets it
catch up under a token budget. Requests that miss one token (decoding) come first, so that a long prompt never
holds up an answer that is being given; what is left of the budget goes to prompts, oldest first, in chunks.

Order: priority (lower first), then arrival. The head of the queue is never overtaken, so nobody starves.
A request is admitted when the cells for its worst case are free, so an admitted one never dies for lack of
cells. Zero-running lemma: nothing running and something waiting means that the head is admitted, because
`limits.token_limit` let in only what fits an empty cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llaisys.engine.limits import Limits
from llaisys.engine.request import Request
from llaisys.types import RequestId


@dataclass(frozen=True, slots=True)
class View:
    """What a plan is made from. Both lists are in `queue_key` order; the requests are only read."""

    waiting: Sequence[Request]
    running: Sequence[Request]
    limits: Limits


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Tokens `start <= i < start + n_tokens` of a request. `samples`: the last one gives the next token."""

    request_id: RequestId
    start: int
    n_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: first end `expire`, then give `admit` a sequence each, then compute `chunks` in one batch.

    Invariants: the chunks' `n_tokens` sum to at most `max_num_batched_tokens`; a request has one chunk at
    most; every chunk is of a running or an admitted request.
    """

    expire: tuple[RequestId, ...]
    admit: tuple[RequestId, ...]
    chunks: tuple[PlannedChunk, ...]


def queue_key(request: Request) -> tuple[int, int]:
    """Sort key: priority, then first come first served."""
    return (request.source.priority, request.ordinal)


def admissible(view: View) -> list[Request]:
    """Waiting requests, in order, for which a sequence and the cells of the worst case are free."""
    slots = view.limits.max_num_seqs - len(view.running)
    cells = view.limits.n_cells - sum(r.token_limit for r in view.running)
    chosen: list[Request] = []
    for request in view.waiting:
        cells -= request.token_limit
        if len(chosen) == slots or cells < 0:
            break
        chosen.append(request)
    return chosen


def plan(view: View, now_s: float) -> Plan:
    """The next step. Equal views and times give equal plans; nothing is changed."""
    expired = [r.request_id for r in (*view.waiting, *view.running) if r.source.deadline_s <= now_s]
    if expired:
        gone = frozenset(expired)
        view = View(
            [r for r in view.waiting if r.request_id not in gone],
            [r for r in view.running if r.request_id not in gone],
            view.limits,
        )
    budget = view.limits.max_num_batched_tokens
    decoding = [r for r in view.running if r.num_missing == 1]
    if len(decoding) > budget:  # the shortest answers first: all advance alike
        decoding = sorted(decoding, key=lambda r: (r.num_output, queue_key(r)))[:budget]
    chunks = [_chunk(r, 1) for r in decoding]
    budget -= len(chunks)
    for request in view.running:
        if budget and request.num_missing > 1:
            chunks.append(_chunk(request, min(request.num_missing, budget)))
            budget -= chunks[-1].n_tokens
    admitted = []
    for request in admissible(view):
        if not budget:
            break
        admitted.append(request.request_id)
        chunks.append(_chunk(request, min(request.num_missing, budget)))
        budget -= chunks[-1].n_tokens
    return Plan(tuple(expired), tuple(admitted), tuple(chunks))


def _chunk(request: Request, n_tokens: int) -> PlannedChunk:
    return PlannedChunk(request.request_id, request.num_computed, n_tokens, n_tokens == request.num_missing)
