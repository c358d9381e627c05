"""A fake of `llaisys._core`: its calls, real accounting of cells and sequence ids, and a hash as the model.

The next token is a function of the tokens of its sequence, and of the seed if it is sampled. A confusion of
sequences, positions or chunks therefore changes a completion. Some tokens cause faults and are never sampled.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fakes.hash_model import D_MODEL as D_MODEL
from fakes.hash_model import DEADLY as DEADLY
from fakes.hash_model import N_PLAIN as N_PLAIN
from fakes.hash_model import NON_FINITE as NON_FINITE
from fakes.hash_model import PANICS as PANICS
from fakes.hash_model import REFUSED as REFUSED
from fakes.hash_model import VOCAB_SIZE as VOCAB_SIZE
from fakes.hash_model import SamplerSpec as SamplerSpec
from fakes.hash_model import answer as answer
from fakes.hash_model import hidden_of as hidden_of
from fakes.hash_model import next_token as next_token
from fakes.hash_model import prompt_logprob as prompt_logprob
from fakes.watchdog import Watchdog as Watchdog
from llaisys.errors import EngineDeadError, ExhaustedError, RejectedError

__version__ = "fake"
CELL_BYTES = 4
Progress = type("Progress", (), {"loading": (4000, 4000)})  # a context is loaded at once


class Panic(BaseException):
    """Stands for a Rust panic, which is not an `Exception` in Python."""


@dataclass
class _Sequence:
    """A sequence with the cell of each position."""

    stream: int
    cells: dict[int, int] = field(default_factory=dict)
    spec: SamplerSpec | None = None
    prompt: list[int] = field(default_factory=list)


# Cells that fit on the fake GPU.
GPU_CELLS = 100


class Gpu:
    """The GPU settings of a context."""

    def __init__(self, folders: list[str], **settings: Any) -> None:
        self.folders, self.settings = folders, settings


class Context:
    """The calls of the compiled context. A sequence id is `generation << 16 | slot`, as in the core.

    A cell stores its token instead of K and V; -1 stands for the NaN fill.
    """

    def __init__(
        self,
        path: str,
        *,
        n_cells: int | None,
        n_seq_max: int,
        max_model_len: int,
        n_streams: int = 1,
        attention_window: int | None = None,
        gpu: Gpu | None = None,
        **settings: Any,
    ) -> None:
        if n_cells is None:
            assert gpu is not None
            n_cells = GPU_CELLS
        if path == "nowhere":
            raise RejectedError(f"{path}: no such model", param="model")
        if n_cells % n_streams:
            raise RejectedError(f"{n_cells} cells in {n_streams} KV streams", param="n_cells")
        self.path, self.settings, self.gpu = path, settings, gpu
        self.isa, self.vocab_size, self.weight_bytes = "fake", VOCAB_SIZE, 0
        self.attention_window = attention_window
        self.graph_refusal: str | None = None
        self.n_cells, self._max_len, self._n_streams = n_cells, max_model_len, n_streams
        self._refs = [0] * n_cells
        self._stored = [-1] * n_cells
        self._nodes: dict[int, dict[int, int]] = {}
        self._node_of: dict[int, int] = {}  # cell -> cache node
        self._free_slots = deque(range(n_seq_max))
        self._generations = [0] * n_seq_max
        self._lent: dict[int, _Sequence] = {}
        self._thread = threading.get_ident()
        self.closed = False
        self.n_decodes = 0
        self.n_rows_max = 0
        self.n_rows = 0

    # --- facts ---

    n_states_kept = 0  # the model has no recurrent layers

    @property
    def n_cells_free(self) -> int:
        return self._refs.count(0)

    def n_cells_free_in(self, stream: int) -> int:
        cells = self._cells_of(stream)
        return self._refs[cells.start : cells.stop].count(0)

    @property
    def n_seq_free(self) -> int:
        return len(self._free_slots)

    def _cells_of(self, stream: int) -> range:
        n = self.n_cells // self._n_streams
        return range(stream * n, stream * n + n)

    def _check(self) -> None:
        if threading.get_ident() != self._thread:
            raise RejectedError("this context belongs to another thread")
        if self.closed:
            raise RejectedError("this context is closed")

    def _sequence(self, seq_id: int) -> _Sequence:
        self._check()
        if seq_id not in self._lent:
            raise RejectedError(f"sequence id {seq_id} is not acquired")
        return self._lent[seq_id]

    # --- sequences ---

    def progress(self) -> None:
        """Return nothing: the fake watchdog does not use it."""

    def seq_acquire(self, stream: int = 0) -> int:
        self._check()
        if not 0 <= stream < self._n_streams:
            raise RejectedError(f"stream {stream} of {self._n_streams}")
        if not self._free_slots:
            raise ExhaustedError("no sequence id is free")
        slot = self._free_slots.popleft()
        seq_id = self._generations[slot] << 16 | slot
        self._lent[seq_id] = _Sequence(stream)
        return seq_id

    def seq_release(self, seq_id: int) -> None:
        self.kv_seq_rm(seq_id, -1, -1)
        del self._lent[seq_id]
        slot = seq_id & 0xFFFF
        self._generations[slot] += 1
        self._free_slots.append(slot)

    def set_sampler(
        self, seq_id: int, spec: SamplerSpec, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]
    ) -> None:
        sequence = self._sequence(seq_id)
        assert prompt_ids.dtype == output_ids.dtype == np.int32
        sequence.spec, sequence.prompt = spec, prompt_ids.tolist()

    # --- decode ---

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        n_seq_id: NDArray[np.int32],
        seq_ids: NDArray[np.int64],
        wants_output: NDArray[np.uint8],
        *,
        logits_mask: tuple[NDArray[np.int32], NDArray[np.uint32]] | None = None,
    ) -> SimpleNamespace:
        self._check()
        n_rows = len(tokens)
        masks = {} if logits_mask is None else dict(zip(logits_mask[0].tolist(), logits_mask[1], strict=True))
        assert all(wants_output[row] for row in masks), "a mask for a row without an output"
        dtypes = [a.dtype for a in (tokens, positions, n_seq_id, seq_ids, wants_output)]
        assert dtypes == [np.int32, np.int32, np.int32, np.int64, np.uint8]
        assert len(positions) == len(n_seq_id) == len(wants_output) == n_rows > 0
        assert len(seq_ids) == n_seq_id.sum() == n_rows, "a row of the engine has one sequence"
        self._refuse(tokens.tolist(), positions.tolist(), seq_ids.tolist())
        self.n_decodes += 1
        self.n_rows_max = max(self.n_rows_max, n_rows)
        self.n_rows += n_rows
        rows, ids, faults, logprobs, hidden, any_hidden = [], [], [], [], [], False
        for row in range(n_rows):
            sequence = self._lent[int(seq_ids[row])]
            if wants_output[row] & 4 and ids[-1] != tokens[row]:  # a rejected draft: its cell is free again
                rows.append(row)
                ids.append(-1)
                hidden.append([0.0] * D_MODEL)
                continue
            (cell,) = self._take(sequence.stream, 1)
            sequence.cells[int(positions[row])] = cell
            self._stored[cell] = int(tokens[row])
            if not wants_output[row]:
                continue
            wants_hidden = bool(wants_output[row] & 2)
            end = int(positions[row]) + 1
            # All positions of the window must be stored. Without a window a sequence may begin anywhere.
            first = max(0, end - self.attention_window) if self.attention_window else min(sequence.cells)
            seen = [self._stored[sequence.cells[p]] for p in range(first, end)]
            assert -1 not in seen, "a free cell was read"
            faulty = NON_FINITE in seen
            rows.append(row)
            hidden.append(hidden_of(seen) if wants_hidden else [0.0] * D_MODEL)
            any_hidden |= wants_hidden
            if not wants_output[row] & 1:
                ids.append(-1)
                continue
            scored = sequence.prompt[end:] if sequence.spec and sequence.spec.prompt_logprobs >= 0 else []
            n_output, mask = end - len(sequence.prompt), masks.get(row)
            drawn = scored[0] if scored else next_token(seen, sequence.spec, n_output, mask)
            ids.append(-1 if faulty else drawn)
            if faulty:
                faults.append((row, "non_finite"))
            elif scored:
                logprobs.append((len(ids) - 1, prompt_logprob(seen, ids[-1]), 1, []))
            elif sequence.spec is not None and sequence.spec.top_logprobs >= 0:
                n_top = min(sequence.spec.top_logprobs, VOCAB_SIZE)
                n_ids = N_PLAIN if n_top <= N_PLAIN else VOCAB_SIZE
                top = [((ids[-1] + i) % n_ids, -0.5 - i) for i in range(n_top)]
                top = [(id, prompt_logprob(seen, id)) for id in sequence.spec.logprob_ids] or top
                logprobs.append((len(ids) - 1, -0.5, 1, top))
        return SimpleNamespace(
            rows=np.array(rows, np.int32),
            token_ids=np.array(ids, np.int32),
            faults=faults,
            logits=None,
            hidden=np.array(hidden, np.float32) if any_hidden else None,
            logprobs=logprobs,
            graph_refusal=self.graph_refusal,
        )

    def _refuse(self, tokens: list[int], positions: list[int], seq_ids: list[int]) -> None:
        """Raise every error of a decode before anything changes."""
        ends = {seq_id: self.kv_seq_pos_max(seq_id) for seq_id in seq_ids}
        for token, position, seq_id in zip(tokens, positions, seq_ids, strict=True):
            if token == REFUSED:
                raise RejectedError(f"token {token} is refused")
            if token == DEADLY:
                raise EngineDeadError("the device is lost")
            if token == PANICS:
                raise Panic("index out of bounds")
            if not 0 <= token < VOCAB_SIZE:
                raise RejectedError(f"token {token} is not in the vocabulary")
            follows = position == ends[seq_id] + 1 or (ends[seq_id] < 0 <= position)
            if not follows or position >= self._max_len:
                raise RejectedError(f"position {position} after {ends[seq_id]}, of {self._max_len}")
            ends[seq_id] = position
        streams = [self._lent[seq_id].stream for seq_id in seq_ids]
        for stream in set(streams):
            n_free, n_needed = self.n_cells_free_in(stream), streams.count(stream)
            if n_needed > n_free:
                raise ExhaustedError(f"{n_needed} cells are needed, {n_free} are free")

    # --- cells ---

    def _take(self, stream: int, n: int) -> list[int]:
        """Allocate free cells of a stream, with one reference each."""
        n_free, in_stream = self.n_cells_free_in(stream), self._cells_of(stream)
        if n_free < n:
            raise ExhaustedError(f"{n} cells are needed, {n_free} are free")
        cells = []
        for _ in range(n):
            cells.append(self._refs.index(0, in_stream.start, in_stream.stop))
            self._refs[cells[-1]] = 1
        return cells

    def _drop(self, cell: int) -> None:
        self._refs[cell] -= 1
        if self._refs[cell] == 0:
            self._stored[cell] = -1

    def kv_seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        sequence = self._sequence(seq_id)
        for position in [p for p in sequence.cells if p >= p0 and (p1 < 0 or p < p1)]:
            self._drop(sequence.cells.pop(position))

    def kv_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        cells, target = self._sequence(src).cells, self._sequence(dst)
        chosen = {p: cell for p, cell in cells.items() if p >= p0 and (p1 < 0 or p < p1)}
        if chosen.keys() & target.cells.keys():
            raise RejectedError("the target has positions there")
        self._show(chosen, target)

    def _show(self, cells: dict[int, int], target: _Sequence) -> None:
        """Add cells to the target: shared within its stream, copied from another one."""
        linked = {p: cell for p, cell in cells.items() if cell in self._cells_of(target.stream)}
        for p, cell in linked.items():
            self._refs[cell] += 1
            target.cells[p] = cell
        others = {p: cell for p, cell in cells.items() if p not in linked}
        for p, cell in zip(others, self._take(target.stream, len(others)), strict=True):
            self._stored[cell] = self._stored[others[p]]
            target.cells[p] = cell

    # --- cache nodes ---

    def _node(self, node: int) -> dict[int, int]:
        self._check()
        if node not in self._nodes:
            raise RejectedError(f"node {node} is unknown")
        return self._nodes[node]

    def kv_node_cache(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        cells = self._sequence(seq_id).cells
        if node in self._nodes:
            raise RejectedError(f"node {node} is known")
        if not 0 <= p0 < p1 or not cells.keys() >= set(range(p0, p1)):
            raise RejectedError(f"the sequence does not have all of {p0} to {p1}")
        chosen = {p: cells[p] for p in range(p0, p1)}
        if self._node_of.keys() & set(chosen.values()):
            raise RejectedError("a cell belongs to another node")
        for cell in chosen.values():
            self._refs[cell] += 1
            self._node_of[cell] = node
        self._nodes[node] = chosen

    def kv_node_attach(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        cells, target = self._node(node), self._sequence(seq_id)
        if not 0 <= p0 < p1 or not cells.keys() >= set(range(p0, p1)):
            raise RejectedError(f"the node does not have all of {p0} to {p1}")
        if p0 != max(target.cells, default=-1) + 1:
            raise RejectedError(f"the sequence does not end at {p0}")
        self._show({p: cells[p] for p in range(p0, p1)}, target)

    def kv_node_relink(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        cells, target = self._node(node), self._sequence(seq_id)
        wanted = set(range(p0, p1))
        if not 0 <= p0 < p1 or not (cells.keys() >= wanted and target.cells.keys() >= wanted):
            raise RejectedError(f"the node or the sequence does not have all of {p0} to {p1}")
        for position in wanted:
            self._drop(target.cells.pop(position))
        self._show({p: cells[p] for p in range(p0, p1)}, target)

    def kv_node_split(self, node: int, at: int, tail: int) -> None:
        cells = self._node(node)
        if tail in self._nodes or not min(cells) < at <= max(cells):
            raise RejectedError(f"node {node} cannot be split at {at} into {tail}")
        self._nodes[tail] = {p: cells.pop(p) for p in sorted(cells) if p >= at}
        self._node_of |= dict.fromkeys(self._nodes[tail].values(), tail)

    def kv_node_trim(self, node: int, at: int) -> None:
        cells = self._node(node)
        if not min(cells) <= at <= max(cells):
            raise RejectedError(f"node {node} cannot be trimmed at {at}")
        for position in [p for p in cells if p >= at]:
            cell = cells.pop(position)
            del self._node_of[cell]
            self._drop(cell)
        if not cells:
            del self._nodes[node]

    def kv_node_export(self, node: int, p0: int, p1: int) -> NDArray[np.uint8]:
        cells = self._node(node)
        if not 0 <= p0 < p1 or not cells.keys() >= set(range(p0, p1)):
            raise RejectedError(f"the node does not have all of {p0} to {p1}")
        return np.array([self._stored[cells[p]] for p in range(p0, p1)], "<i4").view(np.uint8)

    def kv_node_import(self, node: int, stream: int, p0: int, data: NDArray[np.uint8]) -> None:
        self._check()
        n, odd = divmod(len(data), CELL_BYTES)
        if node in self._nodes or odd or not n or p0 + n > self._max_len:
            raise RejectedError(f"{len(data)} bytes cannot be imported at {p0} as node {node}")
        cells = dict(zip(range(p0, p0 + n), self._take(stream, n), strict=True))
        for cell, token in zip(cells.values(), data.view("<i4").tolist(), strict=True):
            self._stored[cell] = token
            self._node_of[cell] = node
        self._nodes[node] = cells

    def fingerprint(self) -> str:
        self._check()
        return self.path

    def kv_seq_pos_min(self, seq_id: int) -> int:
        return min(self._sequence(seq_id).cells, default=-1)

    def kv_seq_pos_max(self, seq_id: int) -> int:
        return max(self._sequence(seq_id).cells, default=-1)

    def check_integrity(self) -> None:
        self._check()
        n_refs = [0] * self.n_cells
        for cells in (*(sequence.cells for sequence in self._lent.values()), *self._nodes.values()):
            for cell in cells.values():
                n_refs[cell] += 1
        if n_refs != self._refs:
            raise EngineDeadError("a cell is leaked, or counted twice")
        if self._node_of != {c: s for s, cells in self._nodes.items() for c in cells.values()}:
            raise EngineDeadError("a cell belongs to two nodes")
        if len(self._lent) + len(self._free_slots) != len(self._generations):
            raise EngineDeadError("a sequence id is lost")

    def close(self) -> None:
        self.closed = True


def available_isas() -> list[str]:
    """Return the one instruction set of the fake."""
    return ["fake"]


def cuda_info(folders: list[str]) -> str:  # noqa: ARG001 -- as the compiled core's
    return json.dumps({"reason": "no NVIDIA driver"})


def inspect(path: str) -> str:
    """Return the JSON description of the fake model."""
    return json.dumps(
        {
            "path": path,
            "file_format": "fake",
            "architecture": "fake",
            "dtype": "float32",
            "n_layers": 1,
            "d_model": 1,
            "n_heads": 1,
            "n_kv_heads": 1,
            "d_head": 1,
            "d_ff": 1,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 128,
            "n_parameters": 1000,
            "weight_bytes": 4000,
            "packed_bytes": {"auto": 4000, "float32": 4000, "bfloat16": 2000, "int8": 1032, "int4": 600},
            "screen_bytes": {"auto": 0, "float32": 0, "bfloat16": 0, "int8": 0, "int4": 0},
            "kv_bytes_per_cell": {"float32": 8, "float16": 4, "bfloat16": 4, "int8": 10},
            "bos_token_id": None,
            "eos_token_ids": [256, 257],
            "generation": {"temperature": 0.0},
            "tokenizer": None,
        }
    )
