"""PrefixCache: radix trees over token ids that record which computed prefixes are cached. Pure.

The trees have the token ids, the core has the cells. A node of a tree corresponds to a cache node of the
core. A cache node is the cells of consecutive positions, which the core keeps even if no sequence uses them.
`PrefixCache` never calls the core. It returns edits, and `KvCacheManager` applies them at once, in order.

There is one tree for each salt (tenant) and KV stream. So no request hits a prefix of another salt, and K and
V are linked within one KV stream only. Hits are compared token by token (by slices), never by a hash alone.

Eviction releases the least recently used path, by the time of its last unpin. `_unpinned` has this order,
with every node before its parent. So its first node is always a leaf, and eviction never searches.

In a model with recurrent layers, a request can continue only from a position whose recurrent state is kept. A
node may have the state after its last token, and a hit ends at the deepest such node. The states have a
bound and a least recently used order of their own, `_states`. A node that lost its state stays on the path to
deeper ones.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

from llaisys.engine.prefix_tree import Key, Node, as_ids, check_node, walk
from llaisys.engine.request import BrokenInvariant

# Number of evicted continuations that are remembered, so that a miss can have the reason "evicted".
N_EVICTED_REMEMBERED_MAX = 1024


@dataclass(frozen=True, slots=True)
class AddNode:
    """Cache the positions `p0 <= p < p1` of the inserted sequence as the new node `node_id`."""

    node_id: int
    p0: int
    p1: int


@dataclass(frozen=True, slots=True)
class SplitNode:
    """Split node `node_id`: it keeps the positions below `at`, and the new node `tail` gets the others."""

    node_id: int
    at: int
    tail: int


@dataclass(frozen=True, slots=True)
class TrimNode:
    """Release the positions `>= at` of node `node_id`; a node without positions is removed."""

    node_id: int
    at: int


@dataclass(frozen=True, slots=True)
class KeepState:
    """Let node `node_id` have the recurrent state of the inserted sequence, which ends where the node ends.

    A split moves the state to the tail, a trim drops it.
    """

    node_id: int


@dataclass(frozen=True, slots=True)
class DropState:
    """Drop the recurrent state of node `node_id`."""

    node_id: int


CacheEdit: TypeAlias = AddNode | SplitNode | TrimNode | KeepState | DropState


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the token at `position` is not cached.

    - `limit`: the caller's limit was reached. `evicted`: it was cached and then evicted.
    - `differs`: the cached path continues with `cached` instead of `token`.
    - `salt`: this salt has cached nothing, another salt has. Tokens are not compared, so that tenants learn
      nothing about each other. `empty`: nothing is cached from here on.
    - `state`: it is cached, but no recurrent state is kept from here on.
    """

    reason: Literal["limit", "evicted", "differs", "salt", "empty", "state"]
    position: int
    token: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: the first `n_tokens` tokens, in the KV stream `stream`.

    - `parts`: (node_id, p0, p1) in order of positions. The last part may be only the head of its node.
    - `miss`: the reason why the next token is not cached. None if every token is cached.
    - `n_evictable`: number of these cells that are not pinned.
    - `n_same`: number of tokens that are cached, including those after the last kept recurrent state.
    """

    n_tokens: int
    parts: tuple[tuple[int, int, int], ...]
    stream: int
    miss: Miss | None
    n_evictable: int = 0
    n_same: int = 0


class Pin:
    """A pinned path: its first `n_tokens` tokens are not evicted until `unpin`, which must be called once.

    - `of_session`: the pin belongs to a session, not to a running request.
    - `needs_state`: the recurrent state at its end is not dropped either, until `PrefixCache.release_state`.
    """

    __slots__ = ("_node", "n_tokens", "needs_state", "of_session")

    def __init__(self, node: Node, *, of_session: bool, needs_state: bool) -> None:
        self._node: Node | None = node
        self.n_tokens = node.end
        self.of_session = of_session
        self.needs_state = needs_state

    def parts(self) -> list[tuple[int, int, int]]:
        """Return the nodes of the path as (node_id, p0, p1), in order of positions."""
        path = [node for node in _pinned_node(self).upward() if node.parent is not None]
        return [(node.node_id, node.start, node.end) for node in reversed(path)]


class PrefixCache:
    """The radix trees of one model. Node ids ascend and are never reused.

    Invariants (`check`):

    - The positions of a path are consecutive from 0.
    - A node is in `_unpinned` of its KV stream exactly if no pin ends at it or below it. It is before its
      parent.
    - A tree without a node and without a pin is removed.
    - At most `n_states_max` nodes have a recurrent state (`_states`, the least recently used first).
    """

    def __init__(self, n_streams: int = 1, n_states_max: int | None = None) -> None:
        """`n_states_max`: the number of recurrent states; None for a model without recurrent layers."""
        self.n_states_max = n_states_max
        self._states: OrderedDict[Node, None] = OrderedDict()
        self._roots: dict[Key, Node] = {}
        self._unpinned: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(n_streams)]
        self._n_cached = [0] * n_streams
        self._n_evictable = [0] * n_streams
        self._evicted: dict[tuple[Key | int, int, int], None] = {}
        self._n_pins = 0
        self._n_session_pinned = 0
        self._n_nodes_created = 0

    # --- queries ---

    def match(
        self,
        salt: str,
        tokens: Sequence[int],
        limit: int,
        stream: int | None = None,
        *,
        releasing: Iterable[Pin] = (),
    ) -> Match:
        """Return the longest cached prefix of `tokens`, up to `limit` tokens.

        Searches all KV streams if `stream` is None and returns the first of equal matches. `releasing`: pins
        that the caller will release. Cells that only one of them pins count as evictable. With recurrent
        layers, the prefix ends where a state is kept.
        """
        ids = as_ids(tokens)
        streams = range(len(self._unpinned)) if stream is None else (stream,)
        private = {node for pin in releasing for node in _pinned_node(pin).upward() if node.n_pins == 1}
        found = [self._match_in((salt, s), ids, limit, private) for s in streams]
        return max(found, key=lambda match: (match.n_tokens, match.n_same))

    @property
    def n_states(self) -> int:
        """Number of nodes that have a recurrent state."""
        return len(self._states)

    def n_cached(self, stream: int = 0) -> int:
        """Return the number of cached cells of a KV stream."""
        return self._n_cached[stream]

    def n_evictable(self, stream: int = 0) -> int:
        """Return the number of cells of a KV stream that `evict` could release now."""
        return self._n_evictable[stream]

    def n_private(self, pin: Pin) -> int:
        """Return the number of cells that only this pin pins."""
        return sum(len(node.tokens) for node in _pinned_node(pin).upward() if node.n_pins == 1)

    @property
    def n_session_pinned(self) -> int:
        """Number of cells pinned by sessions; a cell pinned by several sessions counts once."""
        return self._n_session_pinned

    def dump(self) -> list[tuple[str, int, int, int, list[int], int]]:
        """Return every node as (salt, stream, node_id, start, tokens, pins here and below), parents first."""
        return [
            (salt, stream, node.node_id, node.start, node.tokens.tolist(), node.n_pins)
            for (salt, stream), root in self._roots.items()
            for node in root.subtree()[1:]
        ]

    def paths(self) -> list[tuple[str, int, array[int]]]:
        """Return (salt, stream, tokens) of each whole path; pinned ones, then the most recently used."""
        nodes = [node for root in self._roots.values() for node in root.subtree()]
        last = [node for node in nodes if node.n_pins and node.parent is not None]
        last += [node for order in self._unpinned for node in reversed(order)]
        return [(*node.key, node.path_tokens()) for node in last if not node.children]

    # --- changes ---

    def pin(
        self,
        salt: str,
        tokens: Sequence[int],
        n: int,
        stream: int = 0,
        *,
        of_session: bool = False,
        needs_state: bool = False,
    ) -> tuple[Pin, tuple[CacheEdit, ...]]:
        """Pin the cached part of the first `n` tokens, whose length is the pin's `n_tokens`.

        Return the pin and the edits, because a node is split where the pin ends.
        """
        edits: list[CacheEdit] = []
        lowest = self._descend((salt, stream), as_ids(tokens)[:n], edits)
        pinned = self._pin(lowest, of_session=of_session, needs_state=needs_state)
        return pinned, tuple(edits)

    def release_state(self, pin: Pin) -> None:
        """Let the recurrent state at the end of a pin be dropped; idempotent."""
        if pin.needs_state:
            _pinned_node(pin).n_needing_state -= 1
            pin.needs_state = False

    def unpin(self, pin: Pin) -> None:
        """Release a pin; nodes without another pin become the most recently used.

        Raises BrokenInvariant if the pin was released before.
        """
        lowest = _pinned_node(pin)
        self.release_state(pin)
        pin._node = None
        self._n_pins -= 1
        for node in lowest.upward():
            node.n_pins -= 1
            if pin.of_session:
                node.n_session_pins -= 1
                self._n_session_pinned -= 0 if node.n_session_pins else len(node.tokens)
            if node.n_pins == 0 and node.parent is not None:
                self._mark_used_last(node)
        self._remove_if_empty(lowest.key)

    def insert(
        self, salt: str, tokens: Sequence[int], stream: int = 0, pin: Pin | None = None
    ) -> tuple[Pin, tuple[CacheEdit, ...]]:
        """Cache the computed `tokens` of a sequence; tokens that are cached already do not change.

        Return a pin of the whole path, and the edits. Releases `pin`.
        """
        edits: list[CacheEdit] = []
        ids = as_ids(tokens)
        node = self._descend((salt, stream), ids, edits)
        if node.end < len(ids):
            leaf = self._make_node(node.key, node.end, ids[node.end :])
            node.adopt(leaf)
            self._mark_used_last(leaf)
            self._n_cached[stream] += len(leaf.tokens)
            node = leaf
            edits.append(AddNode(leaf.node_id, leaf.start, leaf.end))
        pinned = self._pin(node, of_session=False, needs_state=False)
        if pin is not None:
            self.unpin(pin)
        return pinned, tuple(edits)

    def keep_state(self, pin: Pin) -> tuple[CacheEdit, ...]:
        """Keep the recurrent state at the end of a pin, and make it the most recently used; return the edits.

        Drops the least recently used state if there are too many. Keeps nothing if pins need all states.
        """
        node = _pinned_node(pin)
        if not self.n_states_max or node.parent is None:
            return ()
        if node in self._states:
            self._states.move_to_end(node)
            return ()
        edits: list[CacheEdit] = []
        if len(self._states) >= self.n_states_max:
            oldest = next((each for each in self._states if not each.n_needing_state), None)
            if oldest is None:
                return ()
            del self._states[oldest]
            edits.append(DropState(oldest.node_id))
        self._states[node] = None
        return (*edits, KeepState(node.node_id))

    def evict(self, n_cells: int, stream: int = 0) -> tuple[int, tuple[CacheEdit, ...]]:
        """Release up to `n_cells` unpinned cells, from the end of the least recently used path.

        Return the number of released cells, and the edits.
        """
        order = self._unpinned[stream]
        n_left, edits = n_cells, []
        while n_left > 0 and order:
            leaf = next(iter(order))
            n_trimmed = min(n_left, len(leaf.tokens))
            edits.append(self._trim(leaf, leaf.end - n_trimmed))
            n_left -= n_trimmed
        return n_cells - n_left, tuple(edits)

    def invalidate(
        self, salt: str, tokens: Sequence[int], stream: int = 0, start: int = 0
    ) -> tuple[CacheEdit, ...]:
        """Remove the cached positions `>= start` of the path of `tokens`, and every path through them.

        Pinned nodes are not removed. For K and V that may be wrong because their request failed.
        """
        root = self._roots.get((salt, stream))
        if root is None:
            return ()
        ids = as_ids(tokens)
        below = next((node for node, n in walk(root, ids, len(ids)) if node.start + n > start), None)
        if below is None:
            return ()
        invalid = [node for node in below.subtree() if node.n_pins == 0]
        return tuple(self._trim(node, max(start, node.start)) for node in reversed(invalid))

    def check(self) -> None:
        """Verify all invariants; raises BrokenInvariant."""
        nodes = [(key[1], node) for key, root in self._roots.items() for node in root.subtree()]
        for stream, node in nodes:
            check_node(node, self._unpinned[stream])
        n_pins = sum(n.n_pins - sum(c.n_pins for c in n.children.values()) for _, n in nodes)
        if n_pins != self._n_pins:
            raise BrokenInvariant(f"the nodes count {n_pins} pins, the cache counts {self._n_pins}")
        n_session_pinned = sum(len(node.tokens) for _, node in nodes if node.n_session_pins)
        if n_session_pinned != self._n_session_pinned:
            raise BrokenInvariant(
                f"sessions pin {n_session_pinned} cells, the cache counts {self._n_session_pinned}"
            )
        if not all(root.children or root.n_pins for root in self._roots.values()):
            raise BrokenInvariant("an empty tree was not removed")
        if not self._states.keys() <= {node for _, node in nodes} or self.n_states > (self.n_states_max or 0):
            raise BrokenInvariant(f"{self.n_states} states are kept, of {self.n_states_max}, or of no node")
        for stream, order in enumerate(self._unpinned):
            cached = [node for s, node in nodes if s == stream and node.parent is not None]
            evictable = [node for node in cached if node.n_pins == 0]
            counts = (sum(len(node.tokens) for node in cached), sum(len(node.tokens) for node in evictable))
            expected = (self._n_cached[stream], self._n_evictable[stream])
            if counts != expected or len(evictable) != len(order):
                raise BrokenInvariant(f"the cell counts of KV stream {stream} are wrong: {counts}")
            position: dict[Node | None, int] = {node: i for i, node in enumerate(order)}
            if any(position.get(node.parent, len(position)) < position[node] for node in order):
                raise BrokenInvariant(f"KV stream {stream} would evict a node before its children")

    # --- inside ---

    def _match_in(self, key: Key, ids: array[int], limit: int, private: Set[Node]) -> Match:
        root = self._roots.get(key)
        path = [] if root is None else walk(root, ids, limit)
        n_same = sum(n for _, n in path)
        usable = path if self.n_states_max is None else self._up_to_state(path)
        parts = tuple((node.node_id, node.start, node.start + n) for node, n in usable[1:])
        n_tokens = parts[-1][2] if parts else 0
        if n_tokens == len(ids):
            miss = None
        elif n_tokens < n_same:
            miss = Miss("state", n_tokens, ids[n_tokens])
        elif n_tokens == limit:
            miss = Miss("limit", n_tokens, ids[n_tokens])
        else:
            miss = self._miss(key, path, n_tokens, ids[n_tokens])
        n_evictable = sum(n for node, n in usable[1:] if node.n_pins == 0 or node in private)
        return Match(n_tokens, parts, key[1], miss, n_evictable, n_same)

    def _up_to_state(self, path: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
        """Return the path up to its last node that is whole and has a recurrent state."""
        n_nodes = len(path)
        while n_nodes > 1 and not (path[n_nodes - 1][0] in self._states and _is_whole(path[n_nodes - 1])):
            n_nodes -= 1
        return path[:n_nodes]

    def _miss(self, key: Key, path: list[tuple[Node, int]], position: int, token: int) -> Miss:
        last, n_matched = path[-1] if path else (None, 0)
        if (key if last is None else last.owner, position, token) in self._evicted:
            return Miss("evicted", position, token)
        if last is None:
            others = any(salt != key[0] for salt, _ in self._roots)
            return Miss("salt" if others else "empty", position, token)
        cached = last.tokens[n_matched] if n_matched < len(last.tokens) else next(iter(last.children), None)
        return Miss("empty" if cached is None else "differs", position, token, cached)

    def _make_node(self, key: Key, start: int, tokens: array[int]) -> Node:
        self._n_nodes_created += 1
        return Node(key, self._n_nodes_created, start, tokens)

    def _descend(self, key: Key, ids: array[int], edits: list[CacheEdit]) -> Node:
        """Return the node at whose end the cached part of `ids` ends, for the caller to pin."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = self._make_node(key, 0, array("i"))
        node, n_matched = walk(root, ids, len(ids))[-1]
        return node if n_matched == len(node.tokens) else self._split(node, n_matched, edits)

    def _split(self, node: Node, n_head: int, edits: list[CacheEdit]) -> Node:
        """Split a node after `n_head` tokens. The head keeps the node id and is returned."""
        head = self._make_node(node.key, node.start, node.tokens[:n_head])
        head.node_id, node.node_id = node.node_id, head.node_id
        head.n_pins, head.n_session_pins = node.n_pins, node.n_session_pins
        if node.parent is None:
            raise BrokenInvariant("a root cannot be split")
        node.parent.adopt(head)
        node.start, node.tokens = node.start + n_head, node.tokens[n_head:]
        head.adopt(node)
        if head.n_pins == 0:
            self._n_evictable[node.key[1]] -= n_head
            self._mark_used_last(head)
        edits.append(SplitNode(head.node_id, node.start, node.node_id))
        return head

    def _pin(self, lowest: Node, *, of_session: bool, needs_state: bool) -> Pin:
        stream = lowest.key[1]
        if needs_state:
            lowest.n_needing_state += 1
            if lowest in self._states:
                self._states.move_to_end(lowest)
        for node in lowest.upward():
            if node.n_pins == 0 and node.parent is not None:
                del self._unpinned[stream][node]
                self._n_evictable[stream] -= len(node.tokens)
            node.n_pins += 1
            if of_session:
                self._n_session_pinned += 0 if node.n_session_pins else len(node.tokens)
                node.n_session_pins += 1
        self._n_pins += 1
        return Pin(lowest, of_session=of_session, needs_state=needs_state)

    def _mark_used_last(self, node: Node) -> None:
        """Make an unpinned node the most recently used."""
        self._unpinned[node.key[1]][node] = None
        self._n_evictable[node.key[1]] += len(node.tokens)

    def _trim(self, leaf: Node, at: int) -> TrimNode:
        """Release the positions `>= at` of an unpinned leaf; remove the leaf if none is left."""
        stream, n_kept = leaf.key[1], at - leaf.start
        token, n_trimmed = leaf.tokens[n_kept], leaf.end - at
        self._states.pop(leaf, None)
        self._n_cached[stream] -= n_trimmed
        self._n_evictable[stream] -= n_trimmed
        if n_kept > 0:
            leaf.tokens = leaf.tokens[:n_kept]
            self._remember_evicted(leaf.owner, at, token)
        elif leaf.parent is not None:
            del self._unpinned[stream][leaf], leaf.parent.children[token]
            self._remember_evicted(leaf.parent.owner, at, token)
            self._remove_if_empty(leaf.key)
        return TrimNode(leaf.node_id, at)

    def _remember_evicted(self, owner: Key | int, position: int, token: int) -> None:
        self._evicted[owner, position, token] = None
        if len(self._evicted) > N_EVICTED_REMEMBERED_MAX:
            del self._evicted[next(iter(self._evicted))]

    def _remove_if_empty(self, key: Key) -> None:
        root = self._roots[key]
        if not root.children and root.n_pins == 0:
            del self._roots[key]


def _is_whole(matched: tuple[Node, int]) -> bool:
    node, n_matched = matched
    return n_matched == len(node.tokens)


def _pinned_node(pin: Pin) -> Node:
    if pin._node is None:
        raise BrokenInvariant("this pin was released before")
    return pin._node
