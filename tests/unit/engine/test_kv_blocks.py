"""KV events: a subscriber that applies them has exactly the whole blocks of the prefix cache."""

from __future__ import annotations

import random

import msgspec
import pytest

from kv_subscriber import Subscriber, cached_blocks
from llaisys.engine.kv_blocks import (
    BLOCK_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvBlocks,
    KvEventBatch,
    block_hashes,
)
from llaisys.engine.lora import hash_in, salted
from llaisys.engine.prefix_cache import Pin, PrefixCache
from llaisys.lora_request import LoRARequest

PROMPT = list(range(40))


class Cache:
    """A prefix cache, and a subscriber to its events."""

    def __init__(self, n_streams: int = 1) -> None:
        self.tree, self.blocks, self.subscriber = PrefixCache(n_streams), KvBlocks(), Subscriber()

    def insert(self, tokens: list[int], salt: str = "", stream: int = 0) -> Pin:
        pin, edits = self.tree.insert(salt, tokens, stream)
        self.blocks.apply(edits, salt, tokens)
        return pin

    def evict(self, n_cells: int, stream: int = 0) -> None:
        self.blocks.apply(self.tree.evict(n_cells, stream)[1])

    def check(self) -> None:
        """Compare the subscriber with the trees."""
        self.subscriber.read(self.blocks.take_events())
        assert self.subscriber.blocks.keys() == cached_blocks(self.tree)


def test_whole_blocks_of_a_path_are_stored_in_one_event() -> None:
    cache = Cache()
    cache.insert(PROMPT)
    (event,) = cache.blocks.take_events()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids) == (block_hashes("", PROMPT), PROMPT[:32])
    assert (event.parent_block_hash, event.lora_id, event.lora_name, event.medium) == (
        None,
        None,
        None,
        "GPU",
    )


def test_blocks_name_their_lora_adapter() -> None:
    cache = Cache()
    adapter = LoRARequest("sql", 3, "/sql")
    cache.blocks.lora_of = lambda salt: adapter if hash_in(salt) else None
    cache.insert(PROMPT, salted("", "0" * 32))
    cache.insert(PROMPT)
    first, second = cache.blocks.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.lora_id, first.lora_name, second.lora_id, second.lora_name) == (3, "sql", None, None)
    assert not set(first.block_hashes) & set(second.block_hashes)


def test_a_longer_path_adds_the_blocks_that_it_completes() -> None:
    cache = Cache()
    cache.insert(PROMPT)
    cache.blocks.take_events()
    cache.insert([*PROMPT, *range(100, 130)])
    (event,) = cache.blocks.take_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == block_hashes("", PROMPT)[-1]
    assert event.token_ids == [*PROMPT[32:], *range(100, 124)]


def test_a_split_changes_nothing_for_subscribers() -> None:
    cache = Cache()
    cache.insert(PROMPT)
    cache.check()
    cache.insert([*PROMPT[:20], 99])  # splits the node inside its second block
    assert cache.blocks.take_events() == []
    cache.check()


def test_a_block_of_two_streams_is_removed_with_the_last_one() -> None:
    cache = Cache(n_streams=2)
    for stream in range(2):
        cache.tree.unpin(cache.insert(PROMPT, stream=stream))
    cache.insert([7] * BLOCK_TOKENS)
    assert len(cache.blocks.take_events()) == 2
    cache.evict(40, stream=0)
    assert cache.blocks.take_events() == []
    cache.evict(40, stream=1)
    assert cache.blocks.take_events() == [BlockRemoved(block_hashes("", PROMPT), "GPU")]


def test_the_last_eviction_clears_all_blocks() -> None:
    cache = Cache()
    cache.tree.unpin(cache.insert(PROMPT))
    cache.evict(40)
    assert cache.blocks.take_events() == [AllBlocksCleared()]
    assert cache.blocks.take_events() == []


def test_hashes_depend_on_salt_tokens_and_everything_before() -> None:
    assert block_hashes("", PROMPT) == block_hashes("", PROMPT[:32])
    assert not {*block_hashes("", PROMPT)} & {*block_hashes("a", PROMPT)}
    assert block_hashes("", [1] * 32)[0] != block_hashes("", [1] * 32)[1]


def test_the_wire_format_is_vllms() -> None:
    stored = BlockStored([b"h" * 32], None, [1], 16, None, "GPU", None)
    batch = KvEventBatch(1.5, [stored, BlockRemoved([b"h" * 32], "GPU"), AllBlocksCleared()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [b"h" * 32],
                "parent_block_hash": None,
                "token_ids": [1],
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [b"h" * 32], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


@pytest.mark.parametrize("seed", range(30))
def test_a_subscriber_has_the_blocks_of_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(n_streams=2)
    pins: list[Pin] = []
    for _ in range(120):
        match rng.randrange(6):
            case 0 | 1 | 2:
                tokens = [rng.randrange(2) for _ in range(rng.choice((1, 15, 16, 17, 40, 70)))]
                tokens[:-1] = [0] * min(len(tokens) - 1, rng.randrange(60)) + tokens[:-1]
                pins.append(cache.insert(tokens, rng.choice(("", "b")), rng.randrange(2)))
            case 3 | 4:
                if pins:
                    cache.tree.unpin(pins.pop(rng.randrange(len(pins))))
            case 5:
                cache.evict(rng.choice((1, 16, 200)), rng.randrange(2))
        if rng.random() < 0.5:
            cache.check()
    for pin in pins:
        cache.tree.unpin(pin)
    for stream in range(2):
        cache.evict(10**6, stream)
    cache.check()
    assert cache.subscriber.blocks == {}
