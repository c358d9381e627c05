"""PrefixCache: radix trees over token ids that record which computed prefixes are cached. Pure.

The trees have the token ids, the core has the cells. A node of a tree corresponds to a cache node of the
core. A cache node is the cells of consecutive positions, which the core keeps even if no sequence uses them.
`PrefixCache` never calls the core. It returns edits, and `KvCacheManager` applies them at once, in order.

There is one tree for each salt (tenant) and KV stream. So no request hits a prefix of another salt, and K and
V are linked within one KV stream only. Hits are compared token by token (by slices), never by a hash alone.

Eviction releases the least recently used path, by the time of its last unpin. `_unpinned` has this order,
with every node before its parent. So its first node is always a leaf, and eviction never searches.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

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


CacheEdit: TypeAlias = AddNode | SplitNode | TrimNode


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the token at `position` is not cached.

    - `limit`: the caller's limit was reached. `evicted`: it was cached and then evicted.
    - `differs`: the cached path continues with `cached` instead of `token`.
    - `salt`: this salt has cached nothing, another salt has. Tokens are not compared, so that tenants learn
      nothing about each other. `empty`: nothing is cached from here on.
    """

    reason: Literal["limit", "evicted", "differs", "salt", "empty"]
    position: int
    token: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: the first `n_tokens` tokens, in the KV stream `stream`.

    - `parts`: (node_id, p0, p1) in order of positions. The last part may be only the head of its node.
    - `miss`: the reason why the next token is not cached. None if every token is cached.
    - `n_evictable`: number of these cells that are not pinned.
    """

    n_tokens: int
    parts: tuple[tuple[int, int, int], ...]
    stream: int
    miss: Miss | None
    n_evictable: int = 0


class Pin:
    """A pinned path: its first `n_tokens` tokens are not evicted until `unpin`, which must be called once.

    `of_session`: the pin belongs to a session, not to a running request.
    """

    __slots__ = ("_node", "n_tokens", "of_session")

    def __init__(self, node: Node, *, of_session: bool) -> None:
        self._node: Node | None = node
        self.n_tokens = node.end
        self.of_session = of_session


class PrefixCache:
    """The radix trees of one model. Node ids ascend and are never reused.

    Invariants (`check`):

    - The positions of a path are consecutive from 0.
    - A node is in `_unpinned` of its KV stream exactly if no pin ends at it or below it. It is before its
      parent.
    - A tree without a node and without a pin is removed.
    """

    def __init__(self, n_streams: int = 1) -> None:
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
        that the caller will release. Cells that only one of them pins count as evictable.
        """
        ids = as_ids(tokens)
        streams = range(len(self._unpinned)) if stream is None else (stream,)
        private = {node for pin in releasing for node in _pinned_node(pin).upward() if node.n_pins == 1}
        found = [self._match_in((salt, s), ids, limit, private) for s in streams]
        return max(found, key=lambda match: match.n_tokens)

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

    # --- changes ---

    def pin(
        self, salt: str, tokens: Sequence[int], n: int, stream: int = 0, *, of_session: bool = False
    ) -> tuple[Pin, tuple[CacheEdit, ...]]:
        """Pin the cached part of the first `n` tokens, whose length is the pin's `n_tokens`.

        Return the pin and the edits, because a node is split where the pin ends.
        """
        edits: list[CacheEdit] = []
        lowest = self._descend((salt, stream), as_ids(tokens)[:n], edits)
        return self._pin(lowest, of_session=of_session), tuple(edits)

    def unpin(self, pin: Pin) -> None:
        """Release a pin; nodes without another pin become the most recently used.

        Raises BrokenInvariant if the pin was released before.
        """
        lowest = _pinned_node(pin)
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
        pinned = self._pin(node, of_session=False)
        if pin is not None:
            self.unpin(pin)
        return pinned, tuple(edits)

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
        parts = tuple((node.node_id, node.start, node.start + n) for node, n in path[1:])
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

    def _pin(self, lowest: Node, *, of_session: bool) -> Pin:
        stream = lowest.key[1]
        for node in lowest.upward():
            if node.n_pins == 0 and node.parent is not None:
                del self._unpinned[stream][node]
                self._n_evictable[stream] -= len(node.tokens)
            node.n_pins += 1
            if of_session:
                self._n_session_pinned += 0 if node.n_session_pins else len(node.tokens)
                node.n_session_pins += 1
        self._n_pins += 1
        return Pin(lowest, of_session=of_session)

    def _mark_used_last(self, node: Node) -> None:
        """Make an unpinned node the most recently used."""
        self._unpinned[node.key[1]][node] = None
        self._n_evictable[node.key[1]] += len(node.tokens)

    def _trim(self, leaf: Node, at: int) -> TrimNode:
        """Release the positions `>= at` of an unpinned leaf; remove the leaf if none is left."""
        stream, n_kept = leaf.key[1], at - leaf.start
        token, n_trimmed = leaf.tokens[n_kept], leaf.end - at
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


def _pinned_node(pin: Pin) -> Node:
    if pin._node is None:
        raise BrokenInvariant("this pin was released before")
    return pin._node


# --- the trees ---

# A tree's salt and KV stream.
Key: TypeAlias = tuple[str, int]


class Node:
    """A node of a radix tree: the tokens at the positions `start <= p < end`. A root has no tokens.

    - `key`: salt and KV stream of its tree. `node_id`: its cache node in the core.
    - `n_pins`: number of pins that end at this node or below. `n_session_pins`: those of sessions.
    - `children`: child nodes by their first token.
    - `serial`: identifies this object. After a split, this object and the pins on it are the tail.
    """

    __slots__ = (
        "children",
        "key",
        "n_pins",
        "n_session_pins",
        "node_id",
        "parent",
        "serial",
        "start",
        "tokens",
    )

    def __init__(self, key: Key, number: int, start: int, tokens: array[int]) -> None:
        self.key = key
        self.node_id = self.serial = number
        self.start = start
        self.tokens = tokens
        self.n_pins = self.n_session_pins = 0
        self.parent: Node | None = None
        self.children: dict[int, Node] = {}

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def owner(self) -> Key | int:
        """The key under which evicted children are remembered. A root has its tree's, which outlives it."""
        return self.key if self.parent is None else self.serial

    def adopt(self, child: Node) -> None:
        """Make `child` a child of this node; it replaces a child with the same first token."""
        child.parent = self
        self.children[child.tokens[0]] = child

    def upward(self) -> Iterator[Node]:
        """Iterate from this node over its parents to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> list[Node]:
        """Return this node and all nodes below it, parents first."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes


def as_ids(tokens: Sequence[int]) -> array[int]:
    """Return token ids as an array, without a copy if they are one."""
    return tokens if isinstance(tokens, array) else array("i", tokens)


def n_common(a: array[int], b: array[int]) -> int:
    """Return the length of the longest common prefix. Bisects by comparing slices, at memory speed."""
    same, differs = 0, min(len(a), len(b)) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def walk(root: Node, ids: array[int], limit: int) -> list[tuple[Node, int]]:
    """Return the path of `ids[:limit]` from the root on: each node and the number of its tokens that match.

    Only the last node may match partly. The cost is linear in the nodes of the path.
    """
    node, at = root, 0
    path = [(root, 0)]
    while at < limit and at < len(ids) and at == node.end:
        child = node.children.get(ids[at])
        if child is None:
            break
        n_same = n_common(child.tokens, ids[at : min(at + len(child.tokens), limit)])
        path.append((child, n_same))
        node, at = child, at + n_same
    return path


def check_node(node: Node, unpinned: Collection[Node]) -> None:
    """Verify a node against its children and the list of unpinned nodes; raises BrokenInvariant."""
    for token, child in node.children.items():
        if child.parent is not node or child.start != node.end or child.tokens[:1] != array("i", [token]):
            raise BrokenInvariant(f"node {child.node_id} has the wrong parent, start or first token")
    if node.n_pins < sum(child.n_pins for child in node.children.values()):
        raise BrokenInvariant(f"node {node.node_id} has fewer pins than its children")
    n_below = sum(child.n_session_pins for child in node.children.values())
    if not n_below <= node.n_session_pins <= node.n_pins:
        raise BrokenInvariant(f"node {node.node_id} counts {node.n_session_pins} session pins")
    if (node in unpinned) != (node.n_pins == 0 and node.parent is not None):
        raise BrokenInvariant(f"node {node.node_id} is wrongly listed as pinned or unpinned")
