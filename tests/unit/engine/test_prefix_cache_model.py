"""The prefix index against a naive model: every cached token is one entry, looked up by all tokens up to it.

Hypothesis drives both with the same calls and shrinks what differs. The edits go to a naive core, which knows
what each cell was computed from, so a node_id that holds the wrong cells is seen too.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llaisys.engine.prefix_cache import AddNode, CacheEdit, Match, Pin, PrefixCache, SplitNode, TrimNode

N_STREAMS = 2
TOKENS = st.lists(st.integers(0, 2), max_size=6)

# What a cell was computed from: salt, KV stream, and all tokens up to its own.
Cell = tuple[str, int, tuple[int, ...]]


@dataclass
class Running:
    """A sequence that runs, and the pin that it holds on its first `n_locked` tokens."""

    salt: str
    stream: int
    tokens: list[int]
    n_locked: int
    pin: Pin

    def cells(self, n: int) -> list[Cell]:
        """The cells of its first `n` tokens."""
        return [(self.salt, self.stream, tuple(self.tokens[: p + 1])) for p in range(n)]


class Segments:
    """The core's side: which node_id holds which cell at which position. Refuses what the core refuses."""

    def __init__(self) -> None:
        self.held: dict[int, dict[int, Cell]] = {}

    def apply(self, edits: tuple[CacheEdit, ...], inserted: list[Cell]) -> None:
        """Carries edits out; `inserted` are the cells of the sequence that is being inserted."""
        for edit in edits:
            match edit:
                case AddNode(node_id, p0, p1):
                    assert node_id not in self.held
                    assert 0 <= p0 < p1 <= len(inserted)
                    new = {p: inserted[p] for p in range(p0, p1)}
                    assert not set(new.values()) & {c for cells in self.held.values() for c in cells.values()}
                    self.held[node_id] = new
                case SplitNode(node_id, at, tail):
                    assert tail not in self.held
                    cells = self.held[node_id]
                    assert min(cells) < at <= max(cells)
                    self.held[tail] = {p: cells.pop(p) for p in sorted(cells) if p >= at}
                case TrimNode(node_id, at):
                    cells = self.held[node_id]
                    assert min(cells) <= at <= max(cells)
                    self.held[node_id] = kept = {p: c for p, c in cells.items() if p < at}
                    if not kept:
                        del self.held[node_id]

    def seen(self, match: Match) -> list[Cell]:
        """What a sequence sees after attaching the parts of a match."""
        cells: list[Cell] = []
        for node_id, p0, p1 in match.parts:
            assert p0 == len(cells) < p1
            cells += [self.held[node_id][p] for p in range(p0, p1)]
        return cells


class PrefixMachine(RuleBasedStateMachine):
    """`cached`: each cached cell with the turn of its last use."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixCache(N_STREAMS)
        self.core = Segments()
        self.cached: dict[Cell, int] = {}
        self.lost: set[Cell] = set()
        self.running: list[Running] = []
        self.turn = 0

    # --- the model ---

    def pinned(self) -> set[Cell]:
        return {cell for r in self.running for cell in r.cells(r.n_locked)}

    def lose(self, cells: set[Cell]) -> None:
        for cell in cells:
            del self.cached[cell]
        self.lost |= cells

    def release(self, running: Running) -> None:
        """The pin goes; what it alone pinned was used now."""
        self.running.remove(running)
        self.index.unpin(running.pin)
        self.turn += 1
        for cell in set(running.cells(running.n_locked)) - self.pinned():
            self.cached[cell] = self.turn

    def insert(self, running: Running) -> None:
        running.pin, edits = self.index.insert(running.salt, running.tokens, running.stream, running.pin)
        running.n_locked = len(running.tokens)
        cells = running.cells(running.n_locked)
        self.core.apply(edits, cells)
        for cell in cells:
            self.cached.setdefault(cell, self.turn)
        assert running.pin.n_tokens == running.n_locked

    def first_to_go(self, stream: int) -> Cell | None:
        """The least recently used of the cells that nothing cached continues and no pin pins."""
        continued = {(salt, s, tokens[:-1]) for salt, s, tokens in self.cached}
        free = [c for c in self.cached if c[1] == stream and c not in continued and c not in self.pinned()]
        return min(free, key=lambda cell: self.cached[cell], default=None)

    # --- what happens ---

    @rule(
        salt=st.sampled_from("ab"),
        stream=st.integers(0, N_STREAMS - 1),
        tokens=TOKENS,
        limit=st.integers(0, 7),
    )
    def admit(self, salt: str, stream: int, tokens: list[int], limit: int) -> None:
        match = self.index.match(salt, tokens, limit, stream)
        cells = [(salt, stream, tuple(tokens[: p + 1])) for p in range(len(tokens))]
        n_found = 0
        while n_found < min(limit, len(tokens)) and cells[n_found] in self.cached:
            n_found += 1
        assert match.n_tokens == n_found
        assert self.core.seen(match) == cells[:n_found]
        assert match.n_evictable == len(set(cells[:n_found]) - self.pinned())
        self.check_miss(match, salt, tokens, limit)
        pin, edits = self.index.pin(salt, tokens, n_found, stream)
        self.core.apply(edits, [])
        assert pin.n_tokens == n_found
        assert self.core.seen(match) == cells[:n_found]
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
        """A sequence grows, and shares what it has computed while it runs on."""
        running = data.draw(st.sampled_from(self.running))
        running.tokens = [*running.tokens, *more]
        self.insert(running)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another sequence sees the same cells."""
        first = data.draw(st.sampled_from(self.running))
        pin, edits = self.index.pin(first.salt, first.tokens, first.n_locked, first.stream)
        assert edits == ()
        self.running.append(Running(first.salt, first.stream, first.tokens, first.n_locked, pin))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        """A sequence ends; a finished or preempted one leaves its tokens to the cache."""
        running = data.draw(st.sampled_from(self.running))
        if keeps:
            self.insert(running)
        self.release(running)

    @rule(n_cells=st.integers(0, 12), stream=st.integers(0, N_STREAMS - 1))
    def evict(self, n_cells: int, stream: int) -> None:
        n_trimmed, edits = self.index.evict(n_cells, stream)
        self.core.apply(edits, [])
        for _ in range(n_trimmed):
            cell = self.first_to_go(stream)
            assert cell is not None
            self.lose({cell})
        assert n_trimmed == n_cells or self.first_to_go(stream) is None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), start=st.integers(0, 4))
    def fail(self, data: st.DataObject, start: int) -> None:
        """A faulty sequence ends, and nothing that it computed from `start` on is used again."""
        running = data.draw(st.sampled_from(self.running))
        self.release(running)
        self.core.apply(self.index.invalidate(running.salt, running.tokens, running.stream, start), [])
        key, first = (running.salt, running.stream), tuple(running.tokens[: start + 1])
        if len(first) == start + 1:
            below = {c for c in self.cached if c[:2] == key and c[2][: start + 1] == first}
            self.lose(below - self.pinned())

    # --- after each ---

    @invariant()
    def both_hold_the_same(self) -> None:
        self.index.check()
        held = [cell for cells in self.core.held.values() for cell in cells.values()]
        assert sorted(held) == sorted(self.cached)
        for stream in range(N_STREAMS):
            here = {cell for cell in self.cached if cell[1] == stream}
            assert self.index.n_cached(stream) == len(here)
            assert self.index.n_evictable(stream) == len(here - self.pinned())

    @invariant()
    def private_cells_are_counted(self) -> None:
        for running in self.running:
            others = {c for r in self.running if r is not running for c in r.cells(r.n_locked)}
            mine = set(running.cells(running.n_locked))
            assert self.index.n_private(running.pin) == len(mine - others)


PrefixMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, print_blob=True, derandomize=True
)
TestPrefixMachine = PrefixMachine.TestCase
