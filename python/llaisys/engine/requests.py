"""Which requests are open, and where each of their choices stands. Pure."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from llaisys.engine.fairness import WaitingQueue, queue_key
from llaisys.engine.request import (
    BrokenInvariant,
    Preempted,
    Request,
    Running,
    WaitingForRemoteKvs,
)
from llaisys.types import RequestId


class OpenRequests:
    """Owned by one engine, which alone changes states; this moves a choice to where its state belongs.

    - `waiting`: wait for capacity. `running`: hold a sequence; in `queue_key` order.
    - `parked`, by ordinal: wait for something else, a sibling's prompt or a restore, in nobody's way.

    Invariant: an open choice is in exactly one of the three, and in `by_ordinal`.
    """

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.parked: dict[int, Request] = {}
        self.by_ordinal: dict[int, Request] = {}
        self._choices: dict[RequestId, list[Request]] = {}

    def __contains__(self, request_id: object) -> bool:
        """True while a choice of the request is open."""
        return request_id in self._choices

    def choices(self, request_id: RequestId) -> list[Request]:
        """The open choices of a request; a copy."""
        return [*self._choices.get(request_id, ())]

    def add(self, choices: Sequence[Request]) -> None:
        """A new request: its first choice waits, or is being restored; the others wait for its prompt."""
        leader = choices[0]
        if isinstance(leader.state, WaitingForRemoteKvs):
            self.parked[leader.ordinal] = leader
        else:
            self.waiting.add(leader)
        self.parked |= {follower.ordinal: follower for follower in choices[1:]}
        self.by_ordinal |= {choice.ordinal: choice for choice in choices}
        self._choices[leader.request_id] = [*choices]

    def join(self, request: Request) -> None:
        """A parked choice has what it waited for."""
        del self.parked[request.ordinal]
        self.waiting.add(request)

    def followers(self, leader: Request) -> list[Request]:
        """Who waits for the leader's prompt."""
        siblings = self._choices[leader.request_id]
        return [each for each in siblings if each.leader is leader and each.ordinal in self.parked]

    def start(self, request: Request) -> None:
        """A waiting choice runs."""
        self.waiting.remove(request)
        insort(self.running, request, key=queue_key)

    def remove(self, request: Request) -> bool:
        """A choice is over, and no longer runs; True if it was the request's last.

        Was it to compute the prompt for others, the first of them does it instead.
        """
        if request.ordinal in self.parked:
            del self.parked[request.ordinal]
        elif request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        followers = self.followers(request)
        for follower in followers:
            follower.leader = None if follower is followers[0] else followers[0]
        if followers:
            self.join(followers[0])
        del self.by_ordinal[request.ordinal]
        siblings = self._choices[request.request_id]
        siblings.remove(request)
        if not siblings:
            del self._choices[request.request_id]
        return not siblings

    def put_back(self, request: Request) -> None:
        """A running choice waits again."""
        self.running.remove(request)
        self.waiting.add(request)

    @property
    def num_queued(self) -> int:
        """Requests that wait. Siblings do not count: their request does."""
        return len(self.restoring) + len(self.waiting) - self.waiting.n_siblings

    @property
    def restoring(self) -> list[Request]:
        """Requests whose session is being restored."""
        return [r for r in self.parked.values() if isinstance(r.state, WaitingForRemoteKvs)]

    def waiting_by_reason(self) -> dict[str, int]:
        """Choices that wait, by what they wait for."""
        n_preempted, n_remote = self.waiting.n_preempted, len(self.restoring)
        return {
            "capacity": len(self.waiting) - n_preempted,
            "preempted": n_preempted,
            "sibling": len(self.parked) - n_remote,
            "remote_kv": n_remote,
        }

    def check(self) -> None:
        """Raises BrokenInvariant if a choice is in no place, in two, or in the wrong one."""
        places = [*self.waiting, *self.running, *self.parked.values()]
        if sorted(r.ordinal for r in places) != sorted(self.by_ordinal):
            raise BrokenInvariant("a request is in no list, in two, or in the wrong one")
        if sorted(self.by_ordinal) != sorted(r.ordinal for rs in self._choices.values() for r in rs):
            raise BrokenInvariant("a choice has no request, or a request a choice that is over")
        n_preempted = sum(isinstance(request.state, Preempted) for request in self.waiting)
        n_siblings = sum(request.leader is not None for request in self.waiting)
        if (n_preempted, n_siblings) != (self.waiting.n_preempted, self.waiting.n_siblings):
            raise BrokenInvariant(
                f"{n_preempted} preempted and {n_siblings} siblings wait, counted otherwise"
            )
        for request in places:
            runs = isinstance(request.state, Running)
            held = request.num_computed, request.num_shared, request.num_reclaimed
            empty = request.lock is None and held == (0, 0, 0)
            if runs != (request in self.running) or not (runs or empty):
                raise BrokenInvariant(f"request {request.ordinal} is {request.state!r} in the wrong place")
