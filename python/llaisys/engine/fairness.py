"""Who is next: priority, then clients in turn by tokens, then first come first served. Pure.

Requests of one priority and one client stand in a *line*, in the order of their arrival; one that was
preempted is older than those that wait, and so comes to stand at its head. Among the lines of the best
priority, deficit round robin (Shreedhar and Varghese, 1996) divides the prompt tokens: a line whose turn
comes is granted a quantum of tokens, and its head goes when the line's deficit covers it. What a request
generated is charged to its line when it ends. A request that has waited too long goes before all of this.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llaisys.engine.request import Request

LineKey: TypeAlias = tuple[int, str]  # priority, client


def queue_key(request: Request) -> tuple[int, int]:
    """Sort key: priority, then first come first served."""
    return (request.source.priority, request.ordinal)


def _line_key(request: Request) -> LineKey:
    return (request.source.priority, request.source.client_id)


def _ordinal(request: Request) -> int:
    return request.ordinal


class WaitingQueue:
    """The requests that wait for capacity, and for nothing else. Invariant: no line is empty.

    `n_preempted` of them ran before; `n_siblings` are later choices of a request.
    """

    def __init__(self) -> None:
        self._lines: dict[LineKey, list[Request]] = {}
        self._n = self.n_preempted = self.n_siblings = 0

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Request]:
        """All of them, by priority and arrival."""
        return iter(sorted((r for line in self._lines.values() for r in line), key=queue_key))

    def last(self, n: int) -> list[Request]:
        """The last `n` of them in that order."""
        return sorted((r for line in self._lines.values() for r in line[-n:]), key=queue_key)[-n:]

    def due(self, now_s: float) -> list[Request]:
        """Those whose deadline has passed, in that order."""
        late = [r for line in self._lines.values() for r in line if r.source.deadline_s <= now_s]
        return sorted(late, key=queue_key)

    @property
    def lines(self) -> dict[LineKey, list[Request]]:
        """Who stands where. Only to be read."""
        return self._lines

    def first_deadline_s(self) -> float | None:
        """The earliest deadline of them; None if nobody waits."""
        return min((r.source.deadline_s for line in self._lines.values() for r in line), default=None)

    def add(self, request: Request) -> None:
        """Takes its place by arrival."""
        insort(self._lines.setdefault(_line_key(request), []), request, key=_ordinal)
        self._count(request, 1)

    def without(self, gone: Sequence[Request]) -> WaitingQueue:
        """A queue of the others; this one stays as it is."""
        left = {request.ordinal for request in gone}
        others = WaitingQueue()
        for key, line in self._lines.items():
            if kept := [request for request in line if request.ordinal not in left]:
                others._lines[key] = kept
                for request in kept:
                    others._count(request, 1)
        return others

    def remove(self, request: Request) -> None:
        """Leaves the queue. Raises KeyError or ValueError if it is not there."""
        key = _line_key(request)
        line = self._lines[key]
        line.remove(request)
        self._count(request, -1)
        if not line:
            del self._lines[key]

    def _count(self, request: Request, change: int) -> None:
        """Neither changes while the request waits."""
        self._n += change
        self.n_preempted += change * (request.num_preempted > 0)
        self.n_siblings += change * (request.leader is not None)


@dataclass(frozen=True, slots=True)
class FairState:
    """What deficit round robin remembers from step to step.

    `turns`: the lines in the order of their turns with their deficits in tokens; the first one's turn it is,
    and its quantum is granted. A line that is empty is forgotten, its deficit too.
    """

    turns: tuple[tuple[LineKey, int], ...] = ()

    def charge(self, request: Request, n_tokens: int) -> FairState:
        """The state after `n_tokens` were served to a request outside its turn."""
        key = _line_key(request)
        if len(self.turns) < 2 or n_tokens == 0:  # nobody to be fair to
            return self
        return FairState(tuple((k, d - n_tokens) if k == key else (k, d) for k, d in self.turns))


class Turns:
    """The walk of one plan through a queue: asks for the `head`, then takes it or leaves its line.

    Changes nothing but itself; `state` is what the next plan starts from.
    """

    def __init__(self, queue: WaitingQueue, fair: FairState, quantum: int, overdue_before_s: float) -> None:
        self._quantum = quantum
        self._overdue_before_s = overdue_before_s
        self._lines = queue.lines
        self._n_taken: dict[LineKey, int] = {}
        self._left: set[LineKey] = set()
        known = [(key, deficit) for key, deficit in fair.turns if key in self._lines]
        met = {key for key, _ in known}
        self._deficits = {**dict(known), **{key: 0 for key in self._lines if key not in met}}
        # By priority, the lines in the order of their turns.
        self._turns: dict[int, list[LineKey]] = {}
        for key in self._deficits:
            self._turns.setdefault(key[0], []).append(key)
        for keys in self._turns.values():
            if keys[0] not in met:
                self._deficits[keys[0]] = quantum

    def head(self) -> Request | None:
        """Who is next; None if nobody is left. Asking again gives the same answer."""
        lines = [key for key in self._deficits if key not in self._left]
        if not lines:
            return None
        late = [r for r in map(self._first, lines) if r.source.arrival_s <= self._overdue_before_s]
        if late:
            return min(late, key=lambda r: (r.source.arrival_s, r.ordinal))
        best = min(priority for priority, _ in lines)
        return self._first(self._whose_turn(best))

    def firsts(self) -> list[Request]:
        """The next request of each line that was not left: any of them can be taken out of its turn."""
        return [self._first(key) for key in self._deficits if key not in self._left]

    def take(self, request: Request, n_tokens: int) -> None:
        """The head, or another line's first request, goes, and its line pays `n_tokens`."""
        key = _line_key(request)
        self._deficits[key] -= n_tokens
        self._n_taken[key] = self._n_taken.get(key, 0) + 1
        if self._n_taken[key] == len(self._lines[key]):
            self._drop(key)

    def leave(self, request: Request) -> None:
        """The line of this first request is passed over for the rest of this plan; its deficit stays."""
        self._left.add(_line_key(request))

    def state(self) -> FairState:
        """Deficits and order of turns now."""
        return FairState(tuple((key, self._deficits[key]) for keys in self._turns.values() for key in keys))

    # --- inside ---

    def _first(self, key: LineKey) -> Request:
        return self._lines[key][self._n_taken.get(key, 0)]

    def _drop(self, key: LineKey) -> None:
        keys = self._turns[key[0]]
        was_first = keys[0] == key
        keys.remove(key)
        del self._deficits[key]
        if not keys:
            del self._turns[key[0]]
        elif was_first:
            self._deficits[keys[0]] += self._quantum

    def _whose_turn(self, priority: int) -> LineKey:
        """Passes turns and quanta on, until the line whose turn it is can pay for its head.

        Whole rounds are counted, not walked. With lines 0..m-1, line 0 has its quantum; line i gets its g-th
        one in turn i + (g - 1) m, line 0 in turn g m.
        """
        keys = [key for key in self._turns[priority] if key not in self._left]
        m, quantum = len(keys), self._quantum
        turn_of = []
        for i, key in enumerate(keys):
            lacks = len(self._first(key).token_ids) - self._deficits[key]
            n_grants = max(0 if i == 0 else 1, -(-lacks // quantum))
            turn_of.append(n_grants * m if i == 0 else i + (n_grants - 1) * m)
        turn = min(turn_of)
        for i, key in enumerate(keys):
            n_grants = turn // m if i == 0 else (turn - i) // m + 1
            self._deficits[key] += quantum * max(0, n_grants)
        first = turn % m
        others = [key for key in self._turns[priority] if key in self._left]
        self._turns[priority] = [*keys[first:], *keys[:first], *others]
        return keys[first]
