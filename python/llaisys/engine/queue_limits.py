"""Whether one more request may wait: the bounds of the queue, and each client's part of them. Pure."""

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
    """Raise QueueFullError if with this request more requests or tokens would wait than allowed.

    Requests that the next step can admit do not count as waiting, nor do siblings of a choice. A request that
    would wait alone is always accepted. `n_available`: returns how many cells are free or evictable.
    `queue_s`: returns the seconds that the waiting prompts need. With several configured clients each has its
    part of both limits.
    """
    reason_full = _reason_full if limits.n_clients < 2 else _reason_client_full
    if (reason := reason_full(request, requests, limits, n_available)) is not None:
        raise QueueFullError(reason, retry_after_s=queue_s(requests.waiting))


def _reason_full(
    request: Request, requests: OpenRequests, limits: Limits, n_available: Callable[[], int]
) -> str | None:
    n_waiting, most, most_tokens = (
        requests.num_queued,
        limits.max_num_queued_reqs,
        limits.max_num_queued_tokens,
    )
    if n_waiting < most and most_tokens is None:
        return None
    waiting = [*requests.waiting, request]
    n_admissible = _n_admissible(waiting, requests.running, limits, n_available)
    n_left = n_waiting + 1 - sum(each.leader is None for each in waiting[:n_admissible])
    n_tokens = sum(len(each.token_ids) for each in waiting[n_admissible:] if each.leader is None)
    if n_left > most:
        return f"{n_waiting} requests wait already, at most {most} may"
    if most_tokens is not None and n_tokens > most_tokens and n_left > 1:
        return f"with this request {n_tokens} tokens of prompts would wait, at most {most_tokens} may"
    return None


def _reason_client_full(
    request: Request, requests: OpenRequests, limits: Limits, n_available: Callable[[], int]
) -> str | None:
    """Return why a client among several may not queue the request; None if it may.

    Preempted requests, which were admitted before, do not count. A request within the client's share of the
    sequence ids is admitted at once, and so always accepted.
    """
    client, n_tokens = request.source.client_id, len(request.token_ids)
    waiting = list(requests.waiting)
    open_now = Counter(r.source.client_id for r in (*requests.running, *waiting))
    if open_now[client] < limits.max_num_seqs // len({*open_now, client}):
        return None
    n_admissible = _n_admissible([*waiting, request], requests.running, limits, n_available)
    queued = [*waiting[n_admissible:], *requests.restoring]
    held: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for each in queued:
        if each.leader is None and not each.num_preempted:
            held[each.source.client_id] += 1
            tokens[each.source.client_id] += len(each.token_ids)
    reqs = Shares(limits.max_num_queued_reqs, limits.n_clients)
    most_tokens = Shares(limits.max_num_queued_tokens or 0, limits.n_clients)
    if not reqs.allows(held, client):
        return f"{held[client]} requests of this client wait already ({reqs.reserved} places are its own)"
    if limits.max_num_queued_tokens and held[client] and not most_tokens.allows(tokens, client, n_tokens):
        return (
            f"with this request {n_tokens + tokens[client]} tokens of this client's prompts would wait "
            f"({most_tokens.reserved} are its own)"
        )
    return None


def _n_admissible(
    waiting: Sequence[Request], running: Sequence[Request], limits: Limits, n_available: Callable[[], int]
) -> int:
    """Return how many waiting requests the next step can admit."""
    n_ids = limits.max_num_seqs - len(running)
    if not n_ids:
        return 0
    n_cells = n_available() - sum(map(lookahead_cells, running))
    for n, each in enumerate(waiting[:n_ids]):
        n_cells -= lookahead_cells(each)
        if n_cells < 0:
            return n
    return min(n_ids, len(waiting))
