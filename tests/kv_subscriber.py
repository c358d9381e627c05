"""A subscriber to KV events, and the blocks that it should know."""

from __future__ import annotations

from llaisys.engine.kv_blocks import (
    BLOCK_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvBlocks,
    KvEvent,
    block_hashes,
)
from llaisys.engine.prefix_cache import Node, PrefixCache


class Subscriber:
    """The blocks that a router knows: hash -> (hash of the block before, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def read(self, events: list[KvEvent]) -> None:
        """Apply events; each must fit what is known."""
        for event in events:
            match event:
                case BlockStored(hashes, parent, tokens, block_size):
                    assert block_size == BLOCK_TOKENS
                    assert len(tokens) == len(hashes) * BLOCK_TOKENS
                    assert parent is None or parent in self.blocks
                    for i, each in enumerate(hashes):
                        assert each not in self.blocks
                        self.blocks[each] = (parent, tuple(tokens[i * BLOCK_TOKENS :][:BLOCK_TOKENS]))
                        parent = each
                case BlockRemoved(hashes):
                    for each in hashes:
                        del self.blocks[each]
                case AllBlocksCleared():
                    self.blocks.clear()


class FollowedBlocks:
    """The `KvEvents` of an engine in a test: a subscriber gets the events at once."""

    def __init__(self) -> None:
        self.blocks, self.subscriber = KvBlocks(), Subscriber()

    def publish(self) -> None:
        self.subscriber.read(self.blocks.take_events())

    def close(self) -> None:
        """Nothing to free."""

    def check(self, cache: PrefixCache) -> None:
        """Publish, and compare the subscriber with the prefix cache."""
        self.publish()
        assert self.subscriber.blocks.keys() == cached_blocks(cache)


def cached_blocks(cache: PrefixCache) -> set[bytes]:
    """Return the hashes of the whole blocks that a prefix cache has."""
    hashes: set[bytes] = set()

    def visit(node: Node, before: list[int]) -> None:
        path = before + node.tokens.tolist()
        hashes.update(block_hashes(node.key[0], path))
        for child in node.children.values():
            visit(child, path)

    for root in cache._roots.values():
        visit(root, [])
    return hashes
