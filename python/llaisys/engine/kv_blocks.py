"""KvBlocks: the prefix cache as blocks of 16 tokens, for routers that follow vLLM's KV events. Pure.

The prefix cache has a cell for each token, and its paths may be split anywhere. A block is 16 consecutive
tokens from a multiple of 16 on. It is stored while the prefix cache has its last token, because a path has
all positions from 0. Events and their format: vLLM's `vllm/distributed/kv_events.py`, and what `vllm-router`
0.1.17 accepts: a batch is an array, an event a map with its `type`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Protocol, TypeAlias

import msgspec

from llaisys.engine.prefix_cache import AddNode, CacheEdit, SplitNode, TrimNode
from llaisys.engine.prefix_tree import as_ids
from llaisys.lora_request import LoRARequest

BLOCK_TOKENS = 16
_BLOCK_BYTES = BLOCK_TOKENS * as_ids(()).itemsize
# vLLM's name of the memory that the model computes from. Routers give other names a lower value.
_MEDIUM = "GPU"


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive blocks of one path are cached now.

    `block_hashes`: 32 bytes each, of a block and all tokens before it. `parent_block_hash`: of the block
    before the first one. `token_ids`: of all these blocks. The fields are vLLM's.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """These blocks are no longer cached."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block is cached."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step. `ts`: seconds since the epoch. `data_parallel_rank`: always 0."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int = 0


class KvEvents(Protocol):
    """Publishes the changes of `blocks`. The engine knows no more of it, because pyzmq is optional."""

    @property
    def blocks(self) -> KvBlocks:
        """The blocks that the prefix cache reports to."""
        ...

    def publish(self) -> None:
        """Publish the changes since the last call; never waits."""
        ...

    def close(self) -> None:
        """Send what waits, and free the sockets; idempotent."""
        ...


class KvBlocks:
    """Follows the edits of the prefix cache. `take_events` returns what changed since the last call."""

    def __init__(self) -> None:
        # By node id: end position and hash of the blocks whose last token the node has, ascending.
        self._of_node: dict[int, list[tuple[int, bytes]]] = {}
        # By hash: the number of KV streams that have the block.
        self._n_stored: Counter[bytes] = Counter()
        self._events: list[KvEvent] = []
        # Returns the LoRA adapter in a salt.
        self.lora_of: Callable[[str], LoRARequest | None] = lambda _: None

    def apply(self, edits: Sequence[CacheEdit], salt: str = "", ids: Sequence[int] = ()) -> None:
        """Record edits. `salt` and `ids` are those of the path that an `AddNode` extends."""
        for edit in edits:
            if isinstance(edit, AddNode):
                self._add(edit, salt, ids)
            elif isinstance(edit, SplitNode):
                blocks = self._of_node.get(edit.node_id, [])
                self._set(edit.tail, [block for block in blocks if block[0] > edit.at])
                self._set(edit.node_id, [block for block in blocks if block[0] <= edit.at])
            elif isinstance(edit, TrimNode):
                blocks = self._of_node.get(edit.node_id, [])
                self._remove([hash_ for end, hash_ in blocks if end > edit.at])
                self._set(edit.node_id, [block for block in blocks if block[0] <= edit.at])

    def take_events(self) -> list[KvEvent]:
        """Return the events since the last call. If no block is left, `AllBlocksCleared` says it."""
        events, self._events = self._events, []
        return [AllBlocksCleared()] if events and not self._n_stored else events

    def _set(self, node_id: int, blocks: list[tuple[int, bytes]]) -> None:
        if blocks:
            self._of_node[node_id] = blocks
        else:
            self._of_node.pop(node_id, None)

    def _add(self, node: AddNode, salt: str, ids: Sequence[int]) -> None:
        hashes = block_hashes(salt, ids[: node.p1])
        first = node.p0 // BLOCK_TOKENS
        added = hashes[first:]
        self._set(node.node_id, [((first + i + 1) * BLOCK_TOKENS, each) for i, each in enumerate(added)])
        self._n_stored.update(added)
        # Another KV stream may have the first of them; paths lose their last blocks first.
        n_known = first + sum(self._n_stored[each] > 1 for each in added)
        if n_known < len(hashes):
            lora = self.lora_of(salt)
            self._events.append(
                BlockStored(
                    block_hashes=hashes[n_known:],
                    parent_block_hash=hashes[n_known - 1] if n_known else None,
                    token_ids=list(ids[n_known * BLOCK_TOKENS : len(hashes) * BLOCK_TOKENS]),
                    block_size=BLOCK_TOKENS,
                    lora_id=None if lora is None else lora.lora_int_id,
                    medium=_MEDIUM,
                    lora_name=None if lora is None else lora.lora_name,
                )
            )

    def _remove(self, hashes: Sequence[bytes]) -> None:
        self._n_stored.subtract(hashes)
        removed = [each for each in hashes if not self._n_stored[each]]
        for each in removed:
            del self._n_stored[each]
        if removed:
            self._events.append(BlockRemoved(removed, _MEDIUM))


def block_hashes(salt: str, ids: Sequence[int]) -> list[bytes]:
    """Return the hash of each whole block of a path; equal hashes mean equal salts and tokens up to there."""
    raw = as_ids(ids).tobytes()
    before = salt.encode("utf-8", "surrogatepass")
    hashes = []
    for begin, end in pairwise(range(0, len(raw) + 1, _BLOCK_BYTES)):
        before = sha256(before + raw[begin:end]).digest()
        hashes.append(before)
    return hashes
