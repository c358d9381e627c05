"""Checks whether one more request may wait: the limits of the queue, and each client's part of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from llaisys.engine.kv_cache_planner import lookahead_cells
from llaisys.engine.limits import Limits
from llaisys.engine.request import Request
from llaisys.engine.request_queue import OpenRequests, WaitingQueue
from llaisys.errors import QueueFullError
from llaisys.shares import Shares


def check_queue(
    request: Request,
    requests: OpenRequests,
    limits: Limits,
    n_available: Callable[[], int],
    queue_s: Callable[[WaitingQueue], float],
) -> None:
    """Raise QueueFullError if this request would make more requests or tokens wait than allowed.

    Requests that the next step can admit do not count as waiting, nor do siblings of a choice. A request that
    would be the only one to wait is always accepted. `n_available`: returns the number of free or evictable
    cells. `queue_s`: returns the predicted seconds of the waiting prompts. With several configured clients,
    each has its part of both limits.
    """
    reason_full = _reason_full if limits.n_clients < 2 else _reason_client_full
    if (reason := reason_full(request, requests, limits, n_available)) is not None:
        raise QueueFullError(reason, retry_after_s=queue_s(requests.waiting))


def _reason_full(
    request: Request, requests: OpenRequests, limits: Limits, n_available: Callable[[], int]
) -> str | None:
    """Return the reason why the request may not be queued; None if it may."""
    n_waiting, max_reqs, max_tokens = (
        requests.num_queued,
        limits.max_num_queued_reqs,
        limits.max_num_queued_tokens,
    )
    if n_waiting < max_reqs and max_tokens is None:
        return None
    waiting = [*requests.waiting, request]
    n_admissible = _n_admissible(waiting, requests.running, limits, n_available)
    n_left = n_waiting + 1 - sum(each.leader is None for each in waiting[:n_admissible])
    n_tokens = sum(len(each.token_ids) for each in waiting[n_admissible:] if each.leader is None)
    if n_left > max_reqs:
        return f"{n_waiting} requests wait; the limit is {max_reqs}"
    if max_tokens is not None and n_tokens > max_tokens and n_left > 1:
        return f"with this request {n_tokens} prompt tokens would wait; the limit is {max_tokens}"
    return None


def _reason_client_full(
    request: Request, requests: OpenRequests, limits: Limits, n_available: Callable[[], int]
) -> str | None:
    """Return the reason why one of several clients may not queue the request; None if it may.

    Preempted requests do not count, because they were admitted before. A request within the client's share of
    the sequence ids is admitted at once, so it is always accepted.
    """
    client, n_tokens = request.source.client_id, len(request.token_ids)
    waiting = list(requests.waiting)
    open_now = Counter(r.source.client_id for r in (*requests.running, *waiting))
    if open_now[client] < limits.max_num_seqs // len({*open_now, client}):
        return None
    n_admissible = _n_admissible([*waiting, request], requests.running, limits, n_available)
    queued = [*waiting[n_admissible:], *requests.restoring]
    n_queued: Counter[str] = Counter()
    n_queued_tokens: Counter[str] = Counter()
    for each in queued:
        if each.leader is None and not each.num_preempted:
            n_queued[each.source.client_id] += 1
            n_queued_tokens[each.source.client_id] += len(each.token_ids)
    req_shares = Shares(limits.max_num_queued_reqs, limits.n_clients)
    token_shares = Shares(limits.max_num_queued_tokens or 0, limits.n_clients)
    if not req_shares.allows(n_queued, client):
        return f"{n_queued[client]} requests of this client wait; {req_shares.reserved} are reserved for it"
    if (
        limits.max_num_queued_tokens
        and n_queued[client]
        and not token_shares.allows(n_queued_tokens, client, n_tokens)
    ):
        return (
            f"with this request {n_tokens + n_queued_tokens[client]} of this client's prompt tokens "
            f"would wait; {token_shares.reserved} are reserved for it"
        )
    return None


def _n_admissible(
    waiting: Sequence[Request], running: Sequence[Request], limits: Limits, n_available: Callable[[], int]
) -> int:
    """Return the number of waiting requests that the next step can admit."""
    n_ids = limits.max_num_seqs - len(running)
    if not n_ids:
        return 0
    n_cells = n_available() - sum(map(lookahead_cells, running))
    for n, each in enumerate(waiting[:n_ids]):
        n_cells -= lookahead_cells(each)
        if n_cells < 0:
            return n
    return min(n_ids, len(waiting))
