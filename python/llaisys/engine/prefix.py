"""Which computed prefixes are kept for reuse, and which goes first: a radix tree over token ids. Pure.

The index holds names, the core holds cells. A node of a tree is a *segment*: the cells of consecutive
positions that the core keeps for the cache, whatever sequences see them. The index never calls the core; it
returns edits, and the engine carries them out in their order, at once.

There is one tree for each salt (tenant) and arena: nobody hits what another salt has cached, and K and V are
linked within one arena only. A hit is compared token by token (by slices), never by a hash alone.

Least recently used: a path was last used when it was last unlocked. `_unpinned` keeps that order with every
node before its parent, so its first node is always a leaf, and evicting never searches.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

from llaisys.engine.radix import Key, Node, as_ids, check_node, walk
from llaisys.engine.request import BrokenInvariant

# Evicted continuations that are remembered, so that a miss can say "evicted"; the oldest are forgotten.
N_LOST_MAX = 1024


@dataclass(frozen=True, slots=True)
class Retain:
    """Hold the cells `p0 <= p < p1` of the sequence that is being inserted, as the new `segment`."""

    segment: int
    p0: int
    p1: int


@dataclass(frozen=True, slots=True)
class Split:
    """`segment` keeps the positions below `at`; the new segment `tail` gets the others."""

    segment: int
    at: int
    tail: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Let go of the positions `>= at` of `segment`; of all of them, and the segment is gone."""

    segment: int
    at: int


CacheEdit: TypeAlias = Retain | Split | Trim


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the token at `position` is not cached.

    - `limit`: the caller asked for no more. `evicted`: it was here, and made room.
    - `differs`: the cache goes on, with `cached` in place of `token`.
    - `salt`: this salt has nothing, some other salt has something (which tokens is not looked at: tenants
      learn nothing of each other). `empty`: nothing was cached from here on.
    """

    reason: Literal["limit", "evicted", "differs", "salt", "empty"]
    position: int
    token: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """The first `n_tokens` tokens are cached in the arena `stream`, as `parts`: (segment, p0, p1) in order.

    A part may be the head of its segment. `miss` is None if every token is cached.
    `n_evictable`: so many of these cells no lock pins yet.
    """

    n_tokens: int
    parts: tuple[tuple[int, int, int], ...]
    stream: int
    miss: Miss | None
    n_evictable: int = 0


class Lock:
    """A pinned path: its first `n_tokens` tokens are not evicted until it is given back, once.

    `of_session`: a session has it, and not a request that runs.
    """

    __slots__ = ("_node", "n_tokens", "of_session")

    def __init__(self, node: Node, *, of_session: bool) -> None:
        self._node: Node | None = node
        self.n_tokens = node.end
        self.of_session = of_session


class PrefixIndex:
    """The trees of one model. Segment ids count up and are never used twice.

    Invariants (`check`): the positions of a path are consecutive from 0; a node is in `_unpinned` of its
    arena exactly if no lock ends at it or below it, and stands there before its parent; a tree without a
    node and without a lock is gone.
    """

    def __init__(self, n_streams: int = 1) -> None:
        self._roots: dict[Key, Node] = {}
        self._unpinned: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(n_streams)]
        self._n_retained = [0] * n_streams
        self._n_evictable = [0] * n_streams
        self._lost: dict[tuple[Key | int, int, int], None] = {}
        self._n_locks = 0
        self._n_session_pinned = 0
        self._n_nodes_made = 0

    # --- questions: nothing changes ---

    def match(
        self,
        salt: str,
        tokens: Sequence[int],
        limit: int,
        stream: int | None = None,
        *,
        leaving: Iterable[Lock] = (),
    ) -> Match:
        """The longest cached prefix of `tokens`, of at most `limit` tokens; of all arenas if `stream` is None
        (of equal ones the first). What only one of the locks `leaving` pins counts as evictable."""
        ids = as_ids(tokens)
        streams = range(len(self._unpinned)) if stream is None else (stream,)
        private = {node for lock in leaving for node in _locked(lock).upward() if node.n_pins == 1}
        found = [self._match_in((salt, s), ids, limit, private) for s in streams]
        return max(found, key=lambda match: match.n_tokens)

    def n_retained(self, stream: int = 0) -> int:
        """Cells that the cache holds in an arena."""
        return self._n_retained[stream]

    def n_evictable(self, stream: int = 0) -> int:
        """Cells that `evict` could let go of now."""
        return self._n_evictable[stream]

    def n_private(self, lock: Lock) -> int:
        """Cells that only this lock keeps from being evicted."""
        return sum(len(node.tokens) for node in _locked(lock).upward() if node.n_pins == 1)

    @property
    def n_session_pinned(self) -> int:
        """Cells that sessions pin; one that several pin counts once."""
        return self._n_session_pinned

    def dump(self) -> list[tuple[str, int, int, int, list[int], int]]:
        """Every node as (salt, stream, segment, start, tokens, locks here and below); parents first."""
        return [
            (salt, stream, node.segment, node.start, node.tokens.tolist(), node.n_pins)
            for (salt, stream), root in self._roots.items()
            for node in root.subtree()[1:]
        ]

    # --- changes ---

    def lock(
        self, salt: str, tokens: Sequence[int], n: int, stream: int = 0, *, of_session: bool = False
    ) -> tuple[Lock, tuple[CacheEdit, ...]]:
        """Pins the cached part of the first `n` tokens (the lock's `n_tokens` says how far it goes) and ends
        a node there."""
        edits: list[CacheEdit] = []
        lowest = self._descend((salt, stream), as_ids(tokens)[:n], edits)
        return self._pin(lowest, of_session=of_session), tuple(edits)

    def unlock(self, lock: Lock) -> None:
        """Gives a lock back; what no other lock pins counts as used just now. A lock is given back once."""
        lowest = _locked(lock)
        lock._node = None
        self._n_locks -= 1
        for node in lowest.upward():
            node.n_pins -= 1
            if lock.of_session:
                node.n_session_pins -= 1
                self._n_session_pinned -= 0 if node.n_session_pins else len(node.tokens)
            if node.n_pins == 0 and node.parent is not None:
                self._place_last(node)
        self._forget_if_empty(lowest.key)

    def insert(
        self, salt: str, tokens: Sequence[int], stream: int = 0, lock: Lock | None = None
    ) -> tuple[Lock, tuple[CacheEdit, ...]]:
        """Caches the computed `tokens` of a sequence; what is cached already stays as it is, and only the
        rest is retained. The new lock pins the whole path, and `lock` is given back."""
        edits: list[CacheEdit] = []
        ids = as_ids(tokens)
        node = self._descend((salt, stream), ids, edits)
        if node.end < len(ids):
            leaf = self._make_node(node.key, node.end, ids[node.end :])
            node.adopt(leaf)
            self._place_last(leaf)
            self._n_retained[stream] += len(leaf.tokens)
            node = leaf
            edits.append(Retain(leaf.segment, leaf.start, leaf.end))
        pinned = self._pin(node, of_session=False)
        if lock is not None:
            self.unlock(lock)
        return pinned, tuple(edits)

    def evict(self, n_cells: int, stream: int = 0) -> tuple[int, tuple[CacheEdit, ...]]:
        """Lets go of `n_cells` cells that no lock pins, or of as many as there are: the least recently used
        path first, from its end. Returns how many."""
        order = self._unpinned[stream]
        n_left, edits = n_cells, []
        while n_left > 0 and order:
            leaf = next(iter(order))
            n_lost = min(n_left, len(leaf.tokens))
            edits.append(self._cut(leaf, leaf.end - n_lost))
            n_left -= n_lost
        return n_cells - n_left, tuple(edits)

    def drop(
        self, salt: str, tokens: Sequence[int], stream: int = 0, start: int = 0
    ) -> tuple[CacheEdit, ...]:
        """Forgets the cached positions `>= start` of the path of `tokens`, and all that was built on them,
        but for what a lock pins. For K and V that are not to be trusted: a faulty request's own."""
        root = self._roots.get((salt, stream))
        if root is None:
            return ()
        ids = as_ids(tokens)
        below = next((node for node, n in walk(root, ids, len(ids)) if node.start + n > start), None)
        if below is None:
            return ()
        doubtful = [node for node in below.subtree() if node.n_pins == 0]
        return tuple(self._cut(node, max(start, node.start)) for node in reversed(doubtful))

    def check(self) -> None:
        """Walks everything; raises BrokenInvariant if an invariant does not hold."""
        nodes = [(key[1], node) for key, root in self._roots.items() for node in root.subtree()]
        for stream, node in nodes:
            check_node(node, self._unpinned[stream])
        n_locks = sum(n.n_pins - sum(c.n_pins for c in n.children.values()) for _, n in nodes)
        if n_locks != self._n_locks:
            raise BrokenInvariant(f"the nodes count {n_locks} locks, the index {self._n_locks}")
        n_session_pinned = sum(len(node.tokens) for _, node in nodes if node.n_session_pins)
        if n_session_pinned != self._n_session_pinned:
            raise BrokenInvariant(
                f"sessions pin {n_session_pinned} cells, counted are {self._n_session_pinned}"
            )
        if not all(root.children or root.n_pins for root in self._roots.values()):
            raise BrokenInvariant("an empty tree was kept")
        for stream, order in enumerate(self._unpinned):
            held = [node for s, node in nodes if s == stream and node.parent is not None]
            free = [node for node in held if node.n_pins == 0]
            counts = (sum(len(node.tokens) for node in held), sum(len(node.tokens) for node in free))
            if counts != (self._n_retained[stream], self._n_evictable[stream]) or len(free) != len(order):
                raise BrokenInvariant(f"the counts of arena {stream} are wrong: {counts}")
            turn: dict[Node | None, int] = {node: i for i, node in enumerate(order)}
            if any(turn.get(node.parent, len(turn)) < turn[node] for node in order):
                raise BrokenInvariant(f"arena {stream} would evict a node before what is below it")

    # --- inside ---

    def _match_in(self, key: Key, ids: array[int], limit: int, private: Set[Node]) -> Match:
        root = self._roots.get(key)
        path = [] if root is None else walk(root, ids, limit)
        parts = tuple((node.segment, node.start, node.start + n) for node, n in path[1:])
        n_tokens = parts[-1][2] if parts else 0
        if n_tokens == len(ids):
            miss = None
        elif n_tokens == limit:
            miss = Miss("limit", n_tokens, ids[n_tokens])
        else:
            miss = self._miss(key, path, n_tokens, ids[n_tokens])
        n_evictable = sum(n for node, n in path[1:] if node.n_pins == 0 or node in private)
        return Match(n_tokens, parts, key[1], miss, n_evictable)

    def _miss(self, key: Key, path: list[tuple[Node, int]], position: int, token: int) -> Miss:
        last, n_matched = path[-1] if path else (None, 0)
        if (key if last is None else last.owner, position, token) in self._lost:
            return Miss("evicted", position, token)
        if last is None:
            others = any(salt != key[0] for salt, _ in self._roots)
            return Miss("salt" if others else "empty", position, token)
        cached = last.tokens[n_matched] if n_matched < len(last.tokens) else next(iter(last.children), None)
        return Miss("empty" if cached is None else "differs", position, token, cached)

    def _make_node(self, key: Key, start: int, tokens: array[int]) -> Node:
        self._n_nodes_made += 1
        return Node(key, self._n_nodes_made, start, tokens)

    def _descend(self, key: Key, ids: array[int], edits: list[CacheEdit]) -> Node:
        """The node that ends where the cached part of `ids` ends; the caller pins it."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = self._make_node(key, 0, array("i"))
        node, n_matched = walk(root, ids, len(ids))[-1]
        return node if n_matched == len(node.tokens) else self._split(node, n_matched, edits)

    def _split(self, node: Node, n_head: int, edits: list[CacheEdit]) -> Node:
        """Cuts a node after `n_head` tokens. The segment stays with the head, which is returned."""
        head = self._make_node(node.key, node.start, node.tokens[:n_head])
        head.segment, node.segment = node.segment, head.segment
        head.n_pins, head.n_session_pins = node.n_pins, node.n_session_pins
        if node.parent is None:
            raise BrokenInvariant("a root has nothing to split")
        node.parent.adopt(head)
        node.start, node.tokens = node.start + n_head, node.tokens[n_head:]
        head.adopt(node)
        if head.n_pins == 0:
            self._n_evictable[node.key[1]] -= n_head
            self._place_last(head)
        edits.append(Split(head.segment, node.start, node.segment))
        return head

    def _pin(self, lowest: Node, *, of_session: bool) -> Lock:
        stream = lowest.key[1]
        for node in lowest.upward():
            if node.n_pins == 0 and node.parent is not None:
                del self._unpinned[stream][node]
                self._n_evictable[stream] -= len(node.tokens)
            node.n_pins += 1
            if of_session:
                self._n_session_pinned += 0 if node.n_session_pins else len(node.tokens)
                node.n_session_pins += 1
        self._n_locks += 1
        return Lock(lowest, of_session=of_session)

    def _place_last(self, node: Node) -> None:
        """Nobody pins this node (any more): it was used just now."""
        self._unpinned[node.key[1]][node] = None
        self._n_evictable[node.key[1]] += len(node.tokens)

    def _cut(self, leaf: Node, at: int) -> Trim:
        """Lets go of an unpinned leaf's positions `>= at`: of its end, or of all of it."""
        stream, n_kept = leaf.key[1], at - leaf.start
        token, n_lost = leaf.tokens[n_kept], leaf.end - at
        self._n_retained[stream] -= n_lost
        self._n_evictable[stream] -= n_lost
        if n_kept > 0:
            leaf.tokens = leaf.tokens[:n_kept]
            self._remember(leaf.owner, at, token)
        elif leaf.parent is not None:
            del self._unpinned[stream][leaf], leaf.parent.children[token]
            self._remember(leaf.parent.owner, at, token)
            self._forget_if_empty(leaf.key)
        return Trim(leaf.segment, at)

    def _remember(self, owner: Key | int, position: int, token: int) -> None:
        self._lost[owner, position, token] = None
        if len(self._lost) > N_LOST_MAX:
            del self._lost[next(iter(self._lost))]

    def _forget_if_empty(self, key: Key) -> None:
        root = self._roots[key]
        if not root.children and root.n_pins == 0:
            del self._roots[key]


def _locked(lock: Lock) -> Node:
    if lock._node is None:
        raise BrokenInvariant("this lock was given back before")
    return lock._node
