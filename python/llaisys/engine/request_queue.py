"""WaitingQueue and OpenRequests: the open requests, and the order of the waiting ones. Pure.

The order is by priority, then fair among clients, then by arrival. Requests of one priority and one client
form a client queue, in order of arrival. A preempted request arrived before the waiting ones, so it becomes
the head of its queue. Deficit round robin (Shreedhar and Varghese, 1996) divides the prompt tokens among the
client queues of the best priority. A queue is granted a quantum of tokens on its turn, and its head is next
once the queue's deficit covers it. Generated tokens are charged to the queue when their request ends. A
request that has waited too long goes before all others.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llaisys.engine.request import BrokenInvariant, Preempted, Request, Running, WaitingForRemoteKvs
from llaisys.outputs import RequestId

ClientKey: TypeAlias = tuple[int, str]  # priority, client


def queue_key(request: Request) -> tuple[int, int]:
    """Sort key: priority, then first come, first served."""
    return (request.source.priority, request.ordinal)


def _client_key(request: Request) -> ClientKey:
    return (request.source.priority, request.source.client_id)


def _ordinal(request: Request) -> int:
    return request.ordinal


class WaitingQueue:
    """The requests that wait only for capacity. Invariant: no client queue is empty.

    `n_preempted`: those that ran before. `n_siblings`: later choices of a request.
    """

    def __init__(self) -> None:
        self._client_queues: dict[ClientKey, list[Request]] = {}
        self._n = self.n_preempted = self.n_siblings = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all requests by priority and arrival."""
        return iter(sorted((r for queue in self._client_queues.values() for r in queue), key=queue_key))

    def last(self, n: int) -> list[Request]:
        """Return the last `n` requests by priority and arrival."""
        tails = (r for queue in self._client_queues.values() for r in queue[-n:])
        return sorted(tails, key=queue_key)[-n:]

    def past_deadline(self, now_s: float) -> list[Request]:
        """Return the requests whose deadline has passed, by priority and arrival."""
        late = [r for queue in self._client_queues.values() for r in queue if r.source.deadline_s <= now_s]
        return sorted(late, key=queue_key)

    @property
    def client_queues(self) -> dict[ClientKey, list[Request]]:
        """The requests of each priority and client, by arrival. Read only."""
        return self._client_queues

    def first_deadline_s(self) -> float | None:
        """Return the earliest deadline; None if no request waits."""
        return min(
            (r.source.deadline_s for queue in self._client_queues.values() for r in queue), default=None
        )

    def add(self, request: Request) -> None:
        """Insert a request by arrival."""
        insort(self._client_queues.setdefault(_client_key(request), []), request, key=_ordinal)
        self._count(request, 1)

    def without(self, gone: Sequence[Request]) -> WaitingQueue:
        """Return a copy of the queue without these requests."""
        left = {request.ordinal for request in gone}
        others = WaitingQueue()
        for key, queue in self._client_queues.items():
            if kept := [request for request in queue if request.ordinal not in left]:
                others._client_queues[key] = kept
                for request in kept:
                    others._count(request, 1)
        return others

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError or ValueError if it is not in the queue."""
        key = _client_key(request)
        queue = self._client_queues[key]
        queue.remove(request)
        self._count(request, -1)
        if not queue:
            del self._client_queues[key]

    def _count(self, request: Request, change: int) -> None:
        """Update the counts. The properties that they depend on do not change while a request waits."""
        self._n += change
        self.n_preempted += change * (request.num_preempted > 0)
        self.n_siblings += change * (request.leader is not None)


@dataclass(frozen=True, slots=True)
class RoundRobinState:
    """The state of deficit round robin between steps.

    `deficits`: the client queues in the order of their turns, with their deficits in tokens. It is the first
    one's turn, and its quantum is granted. An empty queue is removed together with its deficit.
    """

    deficits: tuple[tuple[ClientKey, int], ...] = ()

    def charge(self, request: Request, n_tokens: int) -> RoundRobinState:
        """Return the state after `n_tokens` tokens of a request were served outside its turn."""
        key = _client_key(request)
        if len(self.deficits) < 2 or n_tokens == 0:  # no other client to be fair to
            return self
        return RoundRobinState(tuple((k, d - n_tokens) if k == key else (k, d) for k, d in self.deficits))


class DeficitRoundRobin:
    """Iterates over a waiting queue for one plan: peek at the next request, then pop it or skip its client.

    The queue does not change. The next plan starts from `state`.
    """

    def __init__(
        self, queue: WaitingQueue, state: RoundRobinState, quantum: int, overdue_before_s: float
    ) -> None:
        """`quantum`: tokens granted per turn. Requests that arrived before `overdue_before_s` go first."""
        self._quantum = quantum
        self._overdue_before_s = overdue_before_s
        self._queues = queue.client_queues
        self._n_popped: dict[ClientKey, int] = {}
        self._skipped: set[ClientKey] = set()
        known = [(key, deficit) for key, deficit in state.deficits if key in self._queues]
        known_keys = {key for key, _ in known}
        self._deficits = {**dict(known), **{key: 0 for key in self._queues if key not in known_keys}}
        # By priority, the client queues in the order of their turns.
        self._turns: dict[int, list[ClientKey]] = {}
        for key in self._deficits:
            self._turns.setdefault(key[0], []).append(key)
        for keys in self._turns.values():
            if keys[0] not in known_keys:
                self._deficits[keys[0]] = quantum

    def peek_next(self) -> Request | None:
        """Return the next request without removing it; None if none is left."""
        keys = [key for key in self._deficits if key not in self._skipped]
        if not keys:
            return None
        late = [r for r in map(self._head, keys) if r.source.arrival_s <= self._overdue_before_s]
        if late:
            return min(late, key=lambda r: (r.source.arrival_s, r.ordinal))
        best = min(priority for priority, _ in keys)
        return self._head(self._advance_turn(best))

    def heads(self) -> list[Request]:
        """Return the head of each client queue that was not skipped. Any of them can be popped out of
        turn."""
        return [self._head(key) for key in self._deficits if key not in self._skipped]

    def pop(self, request: Request, n_tokens: int) -> None:
        """Remove the head of a client queue and charge `n_tokens` to the queue."""
        key = _client_key(request)
        self._deficits[key] -= n_tokens
        self._n_popped[key] = self._n_popped.get(key, 0) + 1
        if self._n_popped[key] == len(self._queues[key]):
            self._drop(key)

    def skip_client(self, request: Request) -> None:
        """Skip the client queue of this head for the rest of the plan; its deficit does not change."""
        self._skipped.add(_client_key(request))

    def state(self) -> RoundRobinState:
        """Return the current deficits and order of turns."""
        return RoundRobinState(
            tuple((key, self._deficits[key]) for keys in self._turns.values() for key in keys)
        )

    def _head(self, key: ClientKey) -> Request:
        return self._queues[key][self._n_popped.get(key, 0)]

    def _drop(self, key: ClientKey) -> None:
        keys = self._turns[key[0]]
        was_first = keys[0] == key
        keys.remove(key)
        del self._deficits[key]
        if not keys:
            del self._turns[key[0]]
        elif was_first:
            self._deficits[keys[0]] += self._quantum

    def _advance_turn(self, priority: int) -> ClientKey:
        """Advance turns and grant quanta until the queue on turn can pay for its head; return its key.

        Whole rounds are computed, not iterated. Queues are 0..m-1, and queue 0 has its quantum already. Queue
        i > 0 gets its g-th quantum in turn i + (g - 1) m, queue 0 in turn g m.
        """
        keys = [key for key in self._turns[priority] if key not in self._skipped]
        m, quantum = len(keys), self._quantum
        next_turns = []
        for i, key in enumerate(keys):
            lacks = len(self._head(key).token_ids) - self._deficits[key]
            n_grants = max(0 if i == 0 else 1, -(-lacks // quantum))
            next_turns.append(n_grants * m if i == 0 else i + (n_grants - 1) * m)
        turn = min(next_turns)
        for i, key in enumerate(keys):
            n_grants = turn // m if i == 0 else (turn - i) // m + 1
            self._deficits[key] += quantum * max(0, n_grants)
        first = turn % m
        skipped = [key for key in self._turns[priority] if key in self._skipped]
        self._turns[priority] = [*keys[first:], *keys[:first], *skipped]
        return keys[first]


class OpenRequests:
    """The open choices by state. The engine changes their states, and this class moves them between its
    lists.

    - `waiting`: wait for capacity. `running`: have a sequence id; in `queue_key` order.
    - `parked`, by ordinal: wait for a sibling's prompt or for K and V from disk, and delay no other request.

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
        """Return the open choices of a request, as a copy."""
        return [*self._choices.get(request_id, ())]

    def add(self, choices: Sequence[Request]) -> None:
        """Add a new request. Its first choice waits or is being restored; the others wait for its prompt."""
        leader = choices[0]
        if isinstance(leader.state, WaitingForRemoteKvs):
            self.parked[leader.ordinal] = leader
        else:
            self.waiting.add(leader)
        self.parked |= {follower.ordinal: follower for follower in choices[1:]}
        self.by_ordinal |= {choice.ordinal: choice for choice in choices}
        self._choices[leader.request_id] = [*choices]

    def unpark(self, request: Request) -> None:
        """Move a parked choice to the queue."""
        del self.parked[request.ordinal]
        self.waiting.add(request)

    def followers(self, leader: Request) -> list[Request]:
        """Return the choices that wait for the leader's prompt."""
        siblings = self._choices[leader.request_id]
        return [each for each in siblings if each.leader is leader and each.ordinal in self.parked]

    def start(self, request: Request) -> None:
        """Move a choice from the waiting to the running ones."""
        self.waiting.remove(request)
        insort(self.running, request, key=queue_key)

    def remove(self, request: Request) -> bool:
        """Remove a choice that has ended; return True if it was the request's last.

        If other choices wait for its prompt, the first of them becomes their leader.
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
            self.unpark(followers[0])
        del self.by_ordinal[request.ordinal]
        siblings = self._choices[request.request_id]
        siblings.remove(request)
        if not siblings:
            del self._choices[request.request_id]
        return not siblings

    def requeue(self, request: Request) -> None:
        """Move a preempted choice back to the waiting ones."""
        self.running.remove(request)
        self.waiting.add(request)

    @property
    def num_queued(self) -> int:
        """Number of waiting requests; a request with several choices counts once."""
        return len(self.restoring) + len(self.waiting) - self.waiting.n_siblings

    @property
    def restoring(self) -> list[Request]:
        """Requests whose session is being restored, or whose prefix is being loaded."""
        return [r for r in self.parked.values() if isinstance(r.state, WaitingForRemoteKvs)]

    def waiting_by_reason(self) -> dict[str, int]:
        """Return the number of waiting choices by reason."""
        n_preempted, n_remote = self.waiting.n_preempted, len(self.restoring)
        return {
            "capacity": len(self.waiting) - n_preempted,
            "preempted": n_preempted,
            "sibling": len(self.parked) - n_remote,
            "remote_kv": n_remote,
        }

    def check(self) -> None:
        """Raise BrokenInvariant if a choice is in no list, in two lists, or in the wrong one."""
        places = [*self.waiting, *self.running, *self.parked.values()]
        if sorted(r.ordinal for r in places) != sorted(self.by_ordinal):
            raise BrokenInvariant("a request is in no list, in two lists, or in the wrong one")
        if sorted(self.by_ordinal) != sorted(r.ordinal for rs in self._choices.values() for r in rs):
            raise BrokenInvariant("a choice has no request, or a request has a choice that has ended")
        n_preempted = sum(isinstance(request.state, Preempted) for request in self.waiting)
        n_siblings = sum(request.leader is not None for request in self.waiting)
        if (n_preempted, n_siblings) != (self.waiting.n_preempted, self.waiting.n_siblings):
            raise BrokenInvariant(
                f"{n_preempted} preempted and {n_siblings} sibling choices wait; the queue counts differ"
            )
        for request in places:
            runs = isinstance(request.state, Running)
            held = request.num_computed, request.num_shared, request.num_reclaimed
            empty = request.pin is None and held == (0, 0, 0)
            if runs != (request in self.running) or not (runs or empty):
                raise BrokenInvariant(
                    f"request {request.ordinal} in state {request.state!r} is in the wrong list"
                )
