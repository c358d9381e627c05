"""A simulated world of clients with shares of the running requests. One client sends most of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from llaisys.engine.request import Request
from llaisys.engine.request_queue import queue_key
from llaisys.engine.scheduler import SchedulerOutput, SchedulerView
from sim.world import Mix, World, mix_of

N_CLIENTS = 8
PLENTY = 4 * 32 * 320  # cells for the worst case of all running requests, and for what the cache may pin


def client_mix(seed: int, n_requests: int) -> Mix:
    """Return the mix of a seed. Odd seeds are short of cells; with even seeds no request has a priority."""
    mix = replace(mix_of(seed, n_requests), n_clients=N_CLIENTS, n_running=(16, 17, 24, 32)[seed % 4])
    return mix if seed % 2 else replace(mix, n_cells=PLENTY, n_streams=1, priorities=0.0, load=1.5 * mix.load)


@dataclass
class ClientWorld(World):
    """Checks each plan against a slow model of the shares, in addition to the rules of `World`:

    - The share of a client is `max_num_seqs` divided by the number of clients with open requests, at least 1.
    - Only requests of clients above their share are preempted for a share. Unless cells are short, a request
      of a client below its share is then admitted.
    - No starvation: if there are enough cells, a client with only waiting requests has one admitted within as
      many plans as there are clients. The only exception is that every request above its client's share is
      the oldest of all or worst-case reserved.
    - A client runs only as many worst-case-reserved requests as leave the other clients their part.
    """

    n_for_shares: int = 0
    n_waits_max: int = 0
    waits: Counter[str] = field(default_factory=Counter)

    def _plan(self, view: SchedulerView) -> SchedulerOutput:
        made = super()._plan(view)
        by_ordinal = {r.ordinal: r for r in (*view.running, *view.waiting)}
        stayed = [r for r in view.running if r.ordinal not in made.expire]
        waiting = [r for r in view.waiting if r.ordinal not in made.expire]
        running = Counter(map(client_of, stayed))
        clients = {*running, *map(client_of, waiting)}
        share = max(1, self.limits.max_num_seqs // max(1, len(clients)))
        admitted = [by_ordinal[each.ordinal] for each in made.admit]
        self._check_reserved([*(r for r in stayed if r.ordinal not in made.preempt), *admitted])
        if made.lacks_cells:
            return made
        preempted = Counter(client_of(by_ordinal[ordinal]) for ordinal in made.preempt)
        assert len(made.preempt) <= 1, "more than one request was preempted in a step"
        assert all(running[client] > share for client in preempted), (
            "a request within its client's share was preempted"
        )
        self.n_for_shares += len(made.preempt)
        prefilling = {client_of(r) for r in stayed if r.num_missing > 1}
        below = [r for r in waiting if running[client_of(r)] < share and client_of(r) not in prefilling]
        if made.preempt:
            assert len(stayed) == self.limits.max_num_seqs, "a request was preempted although ids were free"
            assert any(r in below for r in admitted), (
                "a request was preempted, and no request below its share was admitted"
            )
        if self.mix.n_cells < PLENTY:
            return made
        if below and self._can_preempt(stayed, running, share):
            assert any(r in below for r in admitted), "clients below their share wait, none was admitted"
        self._count_waits(waiting, running, admitted)
        return made

    def _count_waits(self, waiting: list[Request], running: Counter[str], admitted: list[Request]) -> None:
        """Count the plans in a row that left a client with only waiting requests."""
        served = {*running, *map(client_of, admitted)}
        starving = {*map(client_of, waiting)} - served
        self.waits = Counter({client: self.waits[client] + 1 for client in starving})
        self.n_waits_max = max(self.n_waits_max, *self.waits.values(), 0)
        assert self.n_waits_max <= N_CLIENTS, f"{self.waits}: a client starves"

    def _can_preempt(self, stayed: list[Request], running: Counter[str], share: int) -> bool:
        """Return whether an id is free, or a client above its share has a request that may be preempted."""
        oldest = min(stayed, key=queue_key, default=None)
        return len(stayed) < self.limits.max_num_seqs or any(
            running[client_of(r)] > share and r is not oldest and not r.worst_case_reserved for r in stayed
        )

    def _check_reserved(self, running: list[Request]) -> None:
        mine = Counter(client_of(r) for r in running if r.worst_case_reserved)
        part = self.limits.max_num_seqs // N_CLIENTS
        assert all(n <= max(1, part - 1) for n in mine.values()), f"{mine} requests are worst-case reserved"


def client_of(request: Request) -> str:
    return request.source.client_id
