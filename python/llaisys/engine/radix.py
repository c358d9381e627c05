"""A radix tree over token ids: its nodes, and the walk down a path. Pure; `PrefixIndex` owns the trees.

Token ids lie in `array("i")` and are compared by slices, so a walk costs the path's nodes and not its tokens'
count in Python steps, and nothing of the rest of the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from llaisys.engine.request import BrokenInvariant

# A tree's salt and arena.
Key: TypeAlias = tuple[str, int]


class Node:
    """Tokens at the positions `start <= p < end`, after its parent's. A root has none, and no segment.

    - `key`: its tree's salt and arena. `n_pins`: locks that end here or below; `n_session_pins`: those of
      them that sessions have. Children by their first token.
    - `serial`: names the node for good; a split leaves the object, and so the locks on it, with the tail.
    """

    __slots__ = (
        "children",
        "key",
        "n_pins",
        "n_session_pins",
        "parent",
        "segment",
        "serial",
        "start",
        "tokens",
    )

    def __init__(self, key: Key, number: int, start: int, tokens: array[int]) -> None:
        self.key = key
        self.segment = self.serial = number
        self.start = start
        self.tokens = tokens
        self.n_pins = self.n_session_pins = 0
        self.parent: Node | None = None
        self.children: dict[int, Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def owner(self) -> Key | int:
        """Whom its evicted children are remembered under: a root goes when it is empty, its key stays."""
        return self.key if self.parent is None else self.serial

    def adopt(self, child: Node) -> None:
        child.parent = self
        self.children[child.tokens[0]] = child

    def upward(self) -> Iterator[Node]:
        """This node, its parent, ..., the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> list[Node]:
        """This node and all below it, parents first."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes


def as_ids(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) else array("i", tokens)


def n_common(a: array[int], b: array[int]) -> int:
    """Length of the longest common head, by halving: slices are compared whole, at memory speed."""
    same, differs = 0, min(len(a), len(b)) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def walk(root: Node, ids: array[int], limit: int) -> list[tuple[Node, int]]:
    """The path of `ids[:limit]` from the root on: each node with how many of its tokens match. Only the last
    may match in part."""
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
    for token, child in node.children.items():
        if child.parent is not node or child.start != node.end or child.tokens[:1] != array("i", [token]):
            raise BrokenInvariant(f"segment {child.segment} hangs in the wrong place")
    if node.n_pins < sum(child.n_pins for child in node.children.values()):
        raise BrokenInvariant(f"segment {node.segment} is pinned less than what is below it")
    n_below = sum(child.n_session_pins for child in node.children.values())
    if not n_below <= node.n_session_pins <= node.n_pins:
        raise BrokenInvariant(f"segment {node.segment} counts {node.n_session_pins} pins of sessions")
    if (node in unpinned) != (node.n_pins == 0 and node.parent is not None):
        raise BrokenInvariant(f"segment {node.segment} is in the wrong list")
