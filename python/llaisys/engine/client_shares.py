"""Shares of sequence ids and KV cells for each client. Pure.

With several configured clients, a client may use everything that the others leave unused. A client with
waiting requests that runs fewer than its share gets a sequence id at once. For that, the scheduler preempts
the newest request above the share of its own client. A share is an equal part among the clients with open
requests.

A worst-case-reserved request is not preempted again. So that such requests cannot use all capacity, a client
runs only as many of them as fit its part among all configured clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from llaisys.engine.limits import Limits
from llaisys.engine.request import Request
from llaisys.engine.request_queue import WaitingQueue, queue_key

# Levels of a running request: within its client's share, or above its share of cells or of sequence ids.
WITHIN, ABOVE_CELLS, ABOVE_IDS = range(3)


class ClientShares:
    """The shares of one plan.

    - `is_contended`: several clients have running or waiting requests. Otherwise nothing is above a share.
    - `n_ids`, `n_cells`: one client's share of the sequence ids, at least 1, and of the cells.
    - `order`: the running requests, those within their client's share first, each part in queue order. The
      scheduler preempts from the end. The first request in queue order stays first and is never preempted.
    """

    def __init__(self, limits: Limits, running: Sequence[Request], waiting: WaitingQueue) -> None:
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._cells: Counter[str] = Counter()
        self._prefilling: set[str] = set()
        self._reserved: dict[str, list[Request]] = {}
        self._levels: dict[int, int] = {}
        self.order = running
        self.is_contended = False
        self.n_ids, self.n_cells = limits.max_num_seqs, limits.n_cells
        if limits.n_clients < 2:
            return
        clients = {client for _, client in waiting.client_queues} | {r.source.client_id for r in running}
        self.is_contended = len(clients) > 1
        self.n_ids = max(1, limits.max_num_seqs // max(1, len(clients)))
        self.n_cells = limits.n_cells // max(1, len(clients))
        # Count requests that are never preempted first, so that the others of their client are above the
        # share.
        oldest = running[:1]
        for request in sorted(
            running, key=lambda r: (r not in oldest and not r.worst_case_reserved, queue_key(r))
        ):
            client = request.source.client_id
            self._levels[request.ordinal] = self._level_of_next(client, _cells_of(request))
            self.admit(request)
        if self.is_contended:
            self.order = sorted(running, key=lambda r: (self.level(r), queue_key(r)))

    def admit(self, request: Request) -> None:
        """Count a request as running."""
        client = request.source.client_id
        self._running[client] += 1
        self._cells[client] += _cells_of(request)
        if request.num_missing > 1:
            self._prefilling.add(client)
        if request.worst_case_reserved:
            self._reserved.setdefault(client, []).append(request)

    def preempt(self, requests: Sequence[Request]) -> None:
        """Stop counting these running requests."""
        for request in requests:
            self._running[request.source.client_id] -= 1
            self._cells[request.source.client_id] -= _cells_of(request)
        self.order = [request for request in self.order if request not in requests]

    def level(self, request: Request) -> int:
        """Return WITHIN, ABOVE_CELLS or ABOVE_IDS for a request that ran when the plan began."""
        return self._levels.get(request.ordinal, WITHIN)

    def is_below(self, request: Request) -> bool:
        """Return True if a waiting request would be within its client's share.

        False while the client computes another prompt, which uses its part of the next steps' tokens.
        """
        client = request.source.client_id
        return client not in self._prefilling and self._level_of_next(client, _cells_of(request)) == WITHIN

    def furthest_below(self, heads: Iterable[Request]) -> Request | None:
        """Return the head of the client below its share that runs the fewest requests.

        None if no client is below its share.
        """
        below = [head for head in heads if self.is_below(head)]
        fewest = {head: self._running[head.source.client_id] for head in below}
        return min(below, key=lambda r: (fewest[r], queue_key(r)), default=None)

    def may_reserve(self, request: Request) -> bool:
        """Return False if the client already runs as many worst-case-reserved requests as it may."""
        limits = self._limits
        if limits.n_clients < 2 or not request.worst_case_reserved:
            return True
        mine = self._reserved.get(request.source.client_id, ())
        # One less than the share, so that one request above it can be preempted.
        n_max = max(1, limits.max_num_seqs // limits.n_clients - 1)
        n_cells = sum(each.token_limit for each in mine) + request.token_limit
        return not mine or (len(mine) < n_max and n_cells <= limits.n_cells // limits.n_clients)

    def preemptible(self, head: Request) -> list[Request]:
        """Return the running requests that may be preempted for `head`'s client, in order of preemption."""
        return [
            request
            for request in reversed(self.order[1:])
            if self.level(request) != WITHIN
            and not request.worst_case_reserved
            and request.source.priority >= head.source.priority
        ]

    def _level_of_next(self, client: str, n_cells: int) -> int:
        """Return the level of a client's next request with `n_cells` cells."""
        if self._running[client] >= self.n_ids:
            return ABOVE_IDS
        is_large = self._running[client] > 0 and self._cells[client] + n_cells > self.n_cells
        return ABOVE_CELLS if is_large else WITHIN


def _cells_of(request: Request) -> int:
    """Return the cells of a request; cells of a shared prompt count for the first choice only."""
    if request.num_reclaimed or request.leader is None:
        return len(request.token_ids) - request.num_reclaimed
    return request.num_output
