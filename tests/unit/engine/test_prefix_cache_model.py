"""The prefix cache compared with a naive model, in which every cached token is one entry of a dict.

A second machine has recurrent states: the model lists the tokens after which a state is kept.

Hypothesis drives both with the same calls and shrinks a difference. A naive core applies the edits and
records from which tokens each cell was computed, so a node with the wrong cells is detected too.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llaisys.engine.prefix_cache import (
    AddNode,
    CacheEdit,
    DropState,
    KeepState,
    Match,
    Pin,
    PrefixCache,
    SplitNode,
    TrimNode,
)

N_STREAMS = 2
N_STATES = 3
TOKENS = st.lists(st.integers(0, 2), max_size=6)

# The origin of a cell: salt, KV stream, and all tokens up to its own.
Cell = tuple[str, int, tuple[int, ...]]


@dataclass
class Running:
    """A running sequence and its pin on the first `n_pinned` tokens."""

    salt: str
    stream: int
    tokens: list[int]
    n_pinned: int
    pin: Pin

    def cells(self, n: int) -> list[Cell]:
        """Return the cells of its first `n` tokens."""
        return [(self.salt, self.stream, tuple(self.tokens[: p + 1])) for p in range(n)]


class NodeStore:
    """A naive core: the cells of each node by position. Asserts the preconditions of the real core."""

    def __init__(self) -> None:
        self.nodes: dict[int, dict[int, Cell]] = {}
        self.states: dict[int, Cell] = {}

    def apply(self, edits: tuple[CacheEdit, ...], inserted: list[Cell]) -> None:
        """Apply edits; `inserted` are the cells of the sequence that is being inserted."""
        for edit in edits:
            match edit:
                case AddNode(node_id, p0, p1):
                    assert node_id not in self.nodes
                    assert 0 <= p0 < p1 <= len(inserted)
                    new = {p: inserted[p] for p in range(p0, p1)}
                    assert not set(new.values()) & {
                        c for cells in self.nodes.values() for c in cells.values()
                    }
                    self.nodes[node_id] = new
                case SplitNode(node_id, at, tail):
                    assert tail not in self.nodes
                    cells = self.nodes[node_id]
                    assert min(cells) < at <= max(cells)
                    self.nodes[tail] = {p: cells.pop(p) for p in sorted(cells) if p >= at}
                    if node_id in self.states:
                        self.states[tail] = self.states.pop(node_id)
                case TrimNode(node_id, at):
                    cells = self.nodes[node_id]
                    assert min(cells) <= at <= max(cells)
                    if at <= max(cells):
                        self.states.pop(node_id, None)
                    self.nodes[node_id] = kept = {p: c for p, c in cells.items() if p < at}
                    if not kept:
                        del self.nodes[node_id]
                case KeepState(node_id):
                    assert node_id not in self.states
                    assert max(self.nodes[node_id]) == len(inserted) - 1
                    self.states[node_id] = inserted[-1]
                case DropState(node_id):
                    del self.states[node_id]
        assert len(self.states) <= N_STATES

    def attached(self, match: Match) -> list[Cell]:
        """Return the cells of a sequence after it has attached the parts of a match."""
        cells: list[Cell] = []
        for node_id, p0, p1 in match.parts:
            assert p0 == len(cells) < p1
            cells += [self.nodes[node_id][p] for p in range(p0, p1)]
        return cells


class PrefixMachine(RuleBasedStateMachine):
    """The state machine. `cached` maps each cached cell to the time of its last use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(N_STREAMS)
        self.core = NodeStore()
        self.cached: dict[Cell, int] = {}
        self.lost: set[Cell] = set()
        self.running: list[Running] = []
        self.clock = 0

    # --- the model ---

    def pinned(self) -> set[Cell]:
        return {cell for r in self.running for cell in r.cells(r.n_pinned)}

    def lose(self, cells: set[Cell]) -> None:
        for cell in cells:
            del self.cached[cell]
        self.lost |= cells

    def release(self, running: Running) -> None:
        """Release the pin; cells that only it pinned count as used now."""
        self.running.remove(running)
        self.cache.unpin(running.pin)
        self.clock += 1
        for cell in set(running.cells(running.n_pinned)) - self.pinned():
            self.cached[cell] = self.clock

    def insert(self, running: Running) -> None:
        running.pin, edits = self.cache.insert(running.salt, running.tokens, running.stream, running.pin)
        running.n_pinned = len(running.tokens)
        cells = running.cells(running.n_pinned)
        self.core.apply(edits, cells)
        for cell in cells:
            self.cached.setdefault(cell, self.clock)
        assert running.pin.n_tokens == running.n_pinned

    def next_evicted(self, stream: int) -> Cell | None:
        """Return the least recently used unpinned cell that no cached cell continues."""
        continued = {(salt, s, tokens[:-1]) for salt, s, tokens in self.cached}
        free = [c for c in self.cached if c[1] == stream and c not in continued and c not in self.pinned()]
        return min(free, key=lambda cell: self.cached[cell], default=None)

    def cached_part(self, salt: str, stream: int, tokens: list[int], limit: int) -> tuple[list[Cell], int]:
        """Return the cells of a path, and how many of the first `limit` are cached without a gap."""
        cells = [(salt, stream, tuple(tokens[: p + 1])) for p in range(len(tokens))]
        n = 0
        while n < min(limit, len(tokens)) and cells[n] in self.cached:
            n += 1
        return cells, n

    # --- rules ---

    @rule(
        salt=st.sampled_from("ab"),
        stream=st.integers(0, N_STREAMS - 1),
        tokens=TOKENS,
        limit=st.integers(0, 7),
    )
    def admit(self, salt: str, stream: int, tokens: list[int], limit: int) -> None:
        match = self.cache.match(salt, tokens, limit, stream)
        cells, n_found = self.cached_part(salt, stream, tokens, limit)
        assert match.n_tokens == n_found
        assert self.core.attached(match) == cells[:n_found]
        assert match.n_evictable == len(set(cells[:n_found]) - self.pinned())
        self.check_miss(match, salt, tokens, limit)
        pin, edits = self.cache.pin(salt, tokens, n_found, stream)
        self.core.apply(edits, [])
        assert pin.n_tokens == n_found
        assert self.core.attached(match) == cells[:n_found]
        self.running.append(Running(salt, stream, tokens, n_found, pin))

    def check_miss(self, match: Match, salt: str, tokens: list[int], limit: int) -> None:
        at = match.n_tokens
        if at == len(tokens):
            assert match.miss is None
            return
        assert match.miss is not None
        assert (match.miss.position, match.miss.token) == (at, tokens[at])
        stem = (salt, match.stream, tuple(tokens[:at]))
        nexts = {c[2][-1] for c in self.cached if (c[0], c[1], c[2][:-1]) == stem}
        match match.miss.reason:
            case "limit":
                assert at == limit
            case "evicted":
                assert (*stem[:2], (*stem[2], tokens[at])) in self.lost
            case "differs":
                assert match.miss.cached in nexts - {tokens[at]}
            case "salt":
                assert at == 0
                assert not any(c[:2] == stem[:2] for c in self.cached)
            case "empty":
                assert not nexts

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=TOKENS)
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        """A running sequence grows and caches its computed tokens."""
        running = data.draw(st.sampled_from(self.running))
        running.tokens = [*running.tokens, *more]
        self.insert(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another sequence shares the same cells."""
        first = data.draw(st.sampled_from(self.running))
        pin, edits = self.cache.pin(first.salt, first.tokens, first.n_pinned, first.stream)
        assert edits == ()
        self.running.append(Running(first.salt, first.stream, first.tokens, first.n_pinned, pin))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        """A sequence ends; a finished or preempted one caches its tokens."""
        running = data.draw(st.sampled_from(self.running))
        if keeps:
            self.insert(running)
        self.release(running)

    @rule(n_cells=st.integers(0, 12), stream=st.integers(0, N_STREAMS - 1))
    def evict(self, n_cells: int, stream: int) -> None:
        n_trimmed, edits = self.cache.evict(n_cells, stream)
        self.core.apply(edits, [])
        for _ in range(n_trimmed):
            cell = self.next_evicted(stream)
            assert cell is not None
            self.lose({cell})
        assert n_trimmed == n_cells or self.next_evicted(stream) is None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), start=st.integers(0, 4))
    def fail(self, data: st.DataObject, start: int) -> None:
        """A faulty sequence ends; its cells from `start` on are invalidated."""
        running = data.draw(st.sampled_from(self.running))
        self.release(running)
        self.core.apply(self.cache.invalidate(running.salt, running.tokens, running.stream, start), [])
        key, first = (running.salt, running.stream), tuple(running.tokens[: start + 1])
        if len(first) == start + 1:
            below = {c for c in self.cached if c[:2] == key and c[2][: start + 1] == first}
            self.lose(below - self.pinned())

    # --- invariants ---

    @invariant()
    def cache_and_model_are_equal(self) -> None:
        self.cache.check()
        stored = [cell for cells in self.core.nodes.values() for cell in cells.values()]
        assert sorted(stored) == sorted(self.cached)
        for stream in range(N_STREAMS):
            here = {cell for cell in self.cached if cell[1] == stream}
            assert self.cache.n_cached(stream) == len(here)
            assert self.cache.n_evictable(stream) == len(here - self.pinned())

    @invariant()
    def private_cells_are_counted(self) -> None:
        for running in self.running:
            others = {c for r in self.running if r is not running for c in r.cells(r.n_pinned)}
            mine = set(running.cells(running.n_pinned))
            assert self.cache.n_private(running.pin) == len(mine - others)


PrefixMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, print_blob=True, derandomize=True
)
TestPrefixMachine = PrefixMachine.TestCase


class RecurrentMachine(PrefixMachine):
    """As `PrefixMachine`, with recurrent states. `kept`: the last cells before states, least recently used
    first."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(N_STREAMS, N_STATES)
        self.kept: list[Cell] = []
        # Requests that were admitted and have not attached their prefix, with the last cell of it.
        self.attaching: list[tuple[Running, Cell]] = []

    def lose(self, cells: set[Cell]) -> None:
        super().lose(cells)
        self.kept = [cell for cell in self.kept if cell not in cells]

    def release(self, running: Running) -> None:
        super().release(running)
        self.attaching = [(other, cell) for other, cell in self.attaching if other is not running]

    def insert(self, running: Running) -> None:
        super().insert(running)
        self.attaching = [(other, cell) for other, cell in self.attaching if other is not running]
        cells = running.cells(running.n_pinned)
        self.core.apply(self.cache.keep_state(running.pin), cells)
        if not cells:
            return
        if cells[-1] not in self.kept and len(self.kept) == N_STATES:
            needed = {cell for _, cell in self.attaching}
            oldest = next((cell for cell in self.kept if cell not in needed), None)
            if oldest is None:
                return
            self.kept.remove(oldest)
        self.use(cells[-1])

    def use(self, cell: Cell) -> None:
        self.kept = [*(other for other in self.kept if other != cell), cell]

    @rule(
        salt=st.sampled_from("ab"),
        stream=st.integers(0, N_STREAMS - 1),
        tokens=TOKENS,
        limit=st.integers(0, 7),
    )
    def admit(self, salt: str, stream: int, tokens: list[int], limit: int) -> None:
        match = self.cache.match(salt, tokens, limit, stream)
        cells, n_same = self.cached_part(salt, stream, tokens, limit)
        n_found = max((n for n in range(1, n_same + 1) if cells[n - 1] in self.kept), default=0)
        assert (match.n_tokens, match.n_same) == (n_found, n_same)
        assert self.core.attached(match) == cells[:n_found]
        assert match.n_evictable == len(set(cells[:n_found]) - self.pinned())
        if n_found < n_same:
            assert match.miss is not None
            assert (match.miss.reason, match.miss.position) == ("state", n_found)
        else:
            self.check_miss(match, salt, tokens, limit)
        pin, edits = self.cache.pin(salt, tokens, n_found, stream, needs_state=True)
        assert edits == ()
        self.running.append(Running(salt, stream, tokens, n_found, pin))
        if n_found:
            assert self.core.states[match.parts[-1][0]] == cells[n_found - 1]
            self.use(cells[n_found - 1])
            self.attaching.append((self.running[-1], cells[n_found - 1]))

    @precondition(lambda self: self.attaching)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        """An admitted request attaches its prefix: the state is still there."""
        running, cell = data.draw(st.sampled_from(self.attaching))
        parts = running.pin.parts()
        assert [self.core.nodes[node][p] for node, p0, p1 in parts for p in range(p0, p1)] == running.cells(
            running.n_pinned
        )
        assert self.core.states[parts[-1][0]] == cell
        self.cache.release_state(running.pin)
        self.attaching.remove((running, cell))

    @invariant()
    def states_and_model_are_equal(self) -> None:
        assert sorted(self.core.states.values()) == sorted(self.kept)
        assert self.cache.n_states == len(self.kept)


RecurrentMachine.TestCase.settings = PrefixMachine.TestCase.settings
TestRecurrentMachine = RecurrentMachine.TestCase
