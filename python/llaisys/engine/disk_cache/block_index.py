"""BlockIndex: which blocks of prefixes are on disk, and LoadCost: whether loading them saves time. Pure.

A block is `BLOCK_TOKENS` consecutive tokens from a multiple of it on. Its key is a hash of everything that
its K and V depend on: model (`fingerprint`), salt (with the adapter), and all tokens up to its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from llaisys.engine.prefix_tree import as_ids
from llaisys.engine.step_speed import moving_average

BLOCK_TOKENS = 256
KEY_BYTES = 32
# After this many lookups in a row for which computing seemed faster, one loads, to measure the disk again.
REFUSALS_MAX = 16


def block_keys(
    secret: bytes, fingerprint: str, salt: str, ids: Sequence[int], *, n_tokens: int
) -> list[bytes]:
    """Return the key of each whole block of a path; `n_tokens` is the length of a block.

    `secret`: key of the hashes, up to 64 bytes. Without it, names of files cannot be compared with the hashes
    of guessed prompts. `salt`: contains the hash of a LoRA adapter.
    """
    root = blake2b(key=secret, digest_size=KEY_BYTES)
    for part in (fingerprint, "", salt):  # "" keeps the keys of older folders
        raw = part.encode("utf-8", "surrogatepass")
        root.update(len(raw).to_bytes(8, "little") + raw)
    parent, keys = root.digest(), []
    for end in range(n_tokens, len(ids) + 1, n_tokens):
        raw = as_ids(ids[end - n_tokens : end]).tobytes()
        parent = blake2b(parent + raw, key=secret, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


class BlockIndex:
    """The keys and sizes of the blocks on disk, the least recently used first.

    Invariant: `n_bytes` is the sum of the sizes. It is at most `n_bytes_max` if `make_space` is called with
    the size of a block before `add`.
    """

    def __init__(self, n_bytes_max: int, blocks: Iterable[tuple[bytes, int]] = ()) -> None:
        """`blocks`: keys and sizes in bytes, the least recently used first."""
        self.n_bytes_max = n_bytes_max
        self._sizes = OrderedDict(blocks)
        self.n_bytes = sum(self._sizes.values())

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        """True if the block is on disk."""
        return key in self._sizes

    def n_consecutive(self, keys: Sequence[bytes], first: int) -> int:
        """Return the number of consecutive blocks on disk from the `first` one of a path on."""
        n = first
        while n < len(keys) and keys[n] in self._sizes:
            n += 1
        return n - first

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make the blocks of a path the most recently used, its first block last of all.

        So the last blocks of a path are dropped first; without its first block, no other could be used.
        """
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def make_space(self, n_bytes: int) -> list[bytes]:
        """Drop the least recently used blocks until `n_bytes` more fit; return their keys."""
        dropped = []
        while self._sizes and self.n_bytes + n_bytes > self.n_bytes_max:
            key, size = self._sizes.popitem(last=False)
            self.n_bytes -= size
            dropped.append(key)
        return dropped

    def add(self, key: bytes, size: int) -> None:
        """Add a block of `size` bytes as the most recently used."""
        self.remove(key)
        self._sizes[key] = size
        self.n_bytes += size

    def remove(self, key: bytes) -> None:
        """Remove a block, if it is there."""
        self.n_bytes -= self._sizes.pop(key, 0)


class LoadCost:
    """Compares the measured speed of loads with that of computing prompts.

    `load_token_s`: seconds to load one token, a moving average; None before the first load.
    """

    def __init__(self) -> None:
        self.load_token_s: float | None = None
        self._n_refused = 0

    def observe(self, seconds: float, n_tokens: int) -> None:
        """Record a load of `n_tokens` that took `seconds`, waiting for steps of other requests included."""
        self.load_token_s = moving_average(self.load_token_s, seconds / n_tokens)

    def is_faster(self, n_loaded: int, n_saved: int, prefill_token_s: float | None) -> bool:
        """Return True if loading `n_loaded` tokens takes no more time than computing `n_saved` tokens.

        `prefill_token_s`: measured seconds per computed prompt token. Without a measurement of both, loading
        counts as faster.
        """
        if self.load_token_s is None or prefill_token_s is None:
            return True
        if n_loaded * self.load_token_s <= n_saved * prefill_token_s:
            self._n_refused = 0
            return True
        self._n_refused = (self._n_refused + 1) % (REFUSALS_MAX + 1)
        return self._n_refused == 0
