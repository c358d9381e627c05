"""What a model is loaded with, on the machine's side. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """Which GPU a context is on, and how it is used: see `_core.Gpu`."""

    ordinal: int
    memory_share: float
    synchronous: bool
    overlap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a context is made with; the names are those of `_core.Context`. `n_cells` None: as many as the
    GPU's memory has room for.
    `shows_progress`: a bar goes to stderr while the weights are loaded.
    """

    path: Path
    dtype: str
    kv_dtype: str
    isa: str
    n_cells: int | None
    n_seq_max: int
    n_batch: int
    max_model_len: int
    n_threads: int
    # These three as in `machine.Cpus`.
    cpu_ids: tuple[int, ...] = ()
    pins: bool = True
    memory_nodes: tuple[int, ...] = ()
    n_streams: int = 1
    n_ranks: int = 1
    screens_head: bool = False
    gpu: GpuSettings | None = None
    shows_progress: bool = False
