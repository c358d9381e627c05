"""A context with the real KvCache of the core and without a model: K, V and the next token are hashes.

The content of a cell is a hash of all tokens up to its own, as K and V depend on them. It moves with the
cells through forks, cache nodes and copies. A token therefore depends on every cell of its row, and one wrong
cell, position or seed changes a completion. With recurrent layers, a row depends on the state of its sequence
instead, which the context gives to cache nodes and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from fakes.core import N_PLAIN, NON_FINITE, REFUSED, VOCAB_SIZE, SamplerSpec
from llaisys._core import KvCache
from llaisys.errors import LlaisysError, RejectedError

_MASK = (1 << 64) - 1
_START = 0x243F6A8885A308D3
_NAN = -1
_DRAFT = 4


class InjectedFault(LlaisysError):
    """The error of a decode that fails once, independent of its requests."""


def grow(content: int, token: int) -> int:
    """Return the content of the next cell; a non-finite one stays non-finite."""
    if content == _NAN or token == NON_FINITE:
        return _NAN
    content = (content ^ token) * 0x9E3779B97F4A7C15 & _MASK
    return content ^ content >> 29


def choose(content: int, spec: SamplerSpec, n_output: int) -> int:
    """Return the token after a row: a hash of its content and, with a temperature, of seed and position."""
    draw = (spec.seed * 8 + spec.choice) * 4096 + n_output if spec.temperature > 0 else 0
    mixed = (content ^ draw) * 0xD6E8FEB86659FD93 & _MASK
    return (mixed ^ mixed >> 32) % N_PLAIN


def answer(prompt: list[int], spec: SamplerSpec) -> Iterator[int]:
    """Yield the output of a request that runs alone, without end."""
    content = _START
    for token in prompt:
        content = grow(content, token)
    n_output = 0
    while True:
        token = choose(content, spec, n_output)
        yield token
        content = grow(content, token)
        n_output += 1


@dataclass(slots=True)
class _Sequence:
    spec: SamplerSpec = field(default_factory=lambda: SamplerSpec(temperature=0.0))
    n_output: int = 0
    contents: list[int] = field(default_factory=list)
    state: int | None = _START


@dataclass(slots=True)
class _CacheNode:
    start: int
    contents: list[int]
    state: int | None = None


class SimContext:
    """The calls of a Worker. `faults`: the number of later decodes with several sequences that fail.

    `n_states_kept`: the model has recurrent layers, and so many cache nodes may have a state.
    """

    isa, weight_bytes, vocab_size = "none", 0, VOCAB_SIZE
    attention_window = None

    def __init__(
        self,
        *,
        n_cells: int,
        n_seq_max: int,
        n_streams: int = 1,
        lifo: bool = False,
        n_states_kept: int | None = None,
    ) -> None:
        self.kv_cache = KvCache(
            n_cells=n_cells, n_seq_max=n_seq_max, n_streams=n_streams, lifo=lifo, n_states_kept=n_states_kept
        )
        self.n_cells = n_cells
        self._is_recurrent = n_states_kept is not None
        self.faults = 0
        self.n_decodes = self.n_rows = self.n_rows_max = 0
        self._sequences: dict[int, _Sequence] = {}
        self._nodes: dict[int, _CacheNode] = {}
        self.n_cells_free_in = self.kv_cache.n_cells_free_in
        self.kv_seq_pos_max = self.kv_cache.kv_seq_pos_max
        self.digest = self.kv_cache.digest

    @property
    def n_cells_free(self) -> int:
        return self.kv_cache.n_cells_free

    @property
    def n_seq_free(self) -> int:
        return self.kv_cache.n_seq_free

    @property
    def n_states_kept(self) -> int:
        return self.kv_cache.n_states_kept

    # --- sequences and cells ---

    def seq_acquire(self, stream: int = 0) -> int:
        seq_id = self.kv_cache.seq_acquire(stream)
        self._sequences[seq_id] = _Sequence()
        return seq_id

    def seq_release(self, seq_id: int) -> None:
        self.kv_cache.seq_release(seq_id)
        del self._sequences[seq_id]

    def set_sampler(
        self, seq_id: int, spec: SamplerSpec, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]
    ) -> None:
        if REFUSED in prompt_ids and spec.temperature == 0:  # rejected at admission; otherwise by the decode
            raise RejectedError("the sampler rejects this prompt")
        sequence = self._sequences[seq_id]
        sequence.spec, sequence.n_output = spec, len(output_ids)

    def kv_seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        assert p1 < 0, "the engine removes only ends"
        self.kv_cache.kv_seq_rm(seq_id, p0, p1)
        sequence = self._sequences[seq_id]
        del sequence.contents[max(p0, 0) :]
        sequence.state = sequence.contents[-1] if sequence.contents else _START

    def kv_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.kv_cache.kv_seq_cp(src, dst, p0, p1)
        assert len(self._sequences[dst].contents) == p0
        self._sequences[dst].contents += self._sequences[src].contents[p0:p1]
        if p1 > p0:  # a choice of a prompt of one token copies nothing
            self._sequences[dst].state = self._sequences[dst].contents[-1]

    def kv_node_cache(self, node_id: int, seq_id: int, p0: int, p1: int) -> None:
        self.kv_cache.kv_node_cache(node_id, seq_id, p0, p1)
        self._nodes[node_id] = _CacheNode(p0, self._sequences[seq_id].contents[p0:p1])

    def kv_node_attach(self, node_id: int, seq_id: int, p0: int, p1: int) -> None:
        self.kv_cache.kv_node_attach(node_id, seq_id, p0, p1)
        node, sequence = self._nodes[node_id], self._sequences[seq_id]
        sequence.contents += node.contents[p0 - node.start : p1 - node.start]
        is_whole = p1 == node.start + len(node.contents)
        sequence.state = (node.state if is_whole else None) if self._is_recurrent else sequence.contents[-1]

    def kv_node_relink(self, node_id: int, seq_id: int, p0: int, p1: int) -> None:
        self.kv_cache.kv_node_relink(node_id, seq_id, p0, p1)
        node = self._nodes[node_id]
        own = self._sequences[seq_id].contents[p0:p1]
        assert own == node.contents[p0 - node.start : p1 - node.start], "relinked to other contents"

    def kv_node_keep_state(self, node_id: int, seq_id: int) -> None:
        self.kv_cache.kv_node_keep_state(node_id, seq_id)
        self._nodes[node_id].state = self._sequences[seq_id].state

    def kv_node_drop_state(self, node_id: int) -> None:
        self.kv_cache.kv_node_drop_state(node_id)
        self._nodes[node_id].state = None

    def kv_node_split(self, node_id: int, at: int, tail: int) -> None:
        self.kv_cache.kv_node_split(node_id, at, tail)
        node = self._nodes[node_id]
        self._nodes[tail] = _CacheNode(at, node.contents[at - node.start :], node.state)
        node.state = None
        del node.contents[at - node.start :]

    def kv_node_trim(self, node_id: int, at: int) -> None:
        self.kv_cache.kv_node_trim(node_id, at)
        node = self._nodes[node_id]
        if at < node.start + len(node.contents):
            node.state = None
        del node.contents[at - node.start :]
        if not node.contents:
            del self._nodes[node_id]

    # --- decode ---

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        n_seq_id: NDArray[np.int32],
        seq_ids: NDArray[np.int64],
        wants_output: NDArray[np.uint8],
    ) -> SimpleNamespace:
        token_list, seq_list, wants = tokens.tolist(), seq_ids.tolist(), wants_output.tolist()
        if self.faults and seq_list[0] != seq_list[-1]:
            self.faults -= 1
            raise InjectedFault("injected fault")
        if REFUSED in token_list:
            raise RejectedError(f"token {REFUSED} is refused")
        contents = self._compute(token_list, seq_list)
        faulty: set[int] = set()
        if _NAN in contents:  # rows that cannot be sampled are not stored
            good = np.array([not (wanted and c == _NAN) for wanted, c in zip(wants, contents, strict=True)])
            if self._is_recurrent:  # nor are earlier rows of their sequences
                faulty = set(seq_ids[~good].tolist())
                good = np.array([seq_id not in faulty for seq_id in seq_list])
            positions, n_seq_id, seq_ids = positions[good], n_seq_id[good], seq_ids[good]
        if len(positions):
            self.kv_cache.extend(positions, n_seq_id, seq_ids)
        self.n_decodes += 1
        self.n_rows += len(contents)
        self.n_rows_max = max(self.n_rows_max, len(contents))
        return self._sample(contents, token_list, seq_list, wants, faulty)

    def _compute(self, tokens: list[int], seq_ids: list[int]) -> list[int]:
        """Return the content of each row: the state of its sequence, grown by its tokens up to this one.

        Without recurrent layers the state is the content of the last cell.
        """
        contents, last, end = [], None, _START
        for token, seq_id in zip(tokens, seq_ids, strict=True):
            if seq_id != last:
                if seq_id not in self._sequences:
                    self.kv_cache.kv_seq_pos_max(seq_id)  # raises
                state = self._sequences[seq_id].state
                assert state is not None, "a sequence without a state is computed"
                last, end = seq_id, state
            end = grow(end, token)
            contents.append(end)
        return contents

    def _sample(
        self,
        contents: list[int],
        tokens: list[int],
        seq_ids: list[int],
        wants: list[int],
        faulty: set[int],
    ) -> SimpleNamespace:
        """Sample the rows with an output, and remove the cells of rejected drafts.

        `faulty`: sequences of which no row is stored.
        """
        rows, ids, faults = [], [], []
        for row, (content, seq_id, wanted) in enumerate(zip(contents, seq_ids, wants, strict=True)):
            sequence = self._sequences[seq_id]
            if wanted:
                rows.append(row)
                if wanted & _DRAFT and ids[-1] != tokens[row]:
                    ids.append(-1)
                    if content != _NAN:
                        self.kv_cache.kv_seq_rm(seq_id, len(sequence.contents), -1)
                    continue
                if content == _NAN or seq_id in faulty:
                    ids.append(-1)
                    faults.append((row, "non_finite"))
                    continue
                ids.append(choose(content, sequence.spec, sequence.n_output))
                sequence.n_output += 1
            if seq_id not in faulty:
                sequence.contents.append(content)
                sequence.state = content
        return SimpleNamespace(
            rows=np.array(rows, np.int32),
            token_ids=np.array(ids, np.int32),
            faults=faults,
            hidden=None,
            logprobs=[],
            graph_refusal=None,
        )

    # --- checks ---

    def check_integrity(self) -> None:
        """Run the check of the KvCache, then check contents and positions.

        Every cell has one content for all sequences and nodes that use it (I3). The positions of a sequence
        are 0 to its length - 1 (I4).
        """
        self.kv_cache.check_integrity()
        snapshot = self.kv_cache.snapshot()
        stored = {seq_id: (0, s.contents) for seq_id, s in self._sequences.items()}
        seen = [(stored[seq_id], runs) for seq_id, _, runs in snapshot.sequences]
        assert len(seen) == len(self._sequences), "a sequence is acquired that the engine does not have"
        kept = [((s.start, s.contents), runs) for i, _, _, runs in snapshot.nodes for s in [self._nodes[i]]]
        assert len(kept) == len(self._nodes)
        content_of: dict[int, int] = {}
        for (start, contents), runs in (*seen, *kept):
            position = start
            for p0, cell, n in runs:
                assert p0 == position, "positions have a gap"
                for i in range(n):
                    content = contents[position + i - start]
                    assert content_of.setdefault(cell + i, content) == content, "a cell has two contents"
                position += n
            assert position == start + len(contents), "the KvCache and the contents differ in length"
        assert len(content_of) == self.n_cells - self.n_cells_free, "cells are leaked"

    def close(self) -> None:
        """Do nothing."""
