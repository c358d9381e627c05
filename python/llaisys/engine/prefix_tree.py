"""The radix trees of the prefix cache: nodes, and the walk along a path. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from llaisys.engine.request import BrokenInvariant

# A tree's salt and KV stream.
Key: TypeAlias = tuple[str, int]


class Node:
    """A node of a radix tree: the tokens at the positions `start <= p < end`. A root has no tokens.

    - `key`: salt and KV stream of its tree. `node_id`: its cache node in the core.
    - `n_pins`: number of pins that end at this node or below. `n_session_pins`: those of sessions.
    - `n_needing_state`: number of pins that end at this node and need its recurrent state.
    - `children`: child nodes by their first token.
    - `serial`: identifies this object. After a split, this object and the pins on it are the tail.
    """

    __slots__ = (
        "children",
        "key",
        "n_needing_state",
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
        self.n_pins = self.n_session_pins = self.n_needing_state = 0
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

    def path_tokens(self) -> array[int]:
        """Return the tokens from position 0 to the end of this node."""
        ids = array("i")
        for node in reversed([*self.upward()]):
            ids += node.tokens
        return ids

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
