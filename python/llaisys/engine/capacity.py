"""How large the KV cache and the context are, and whether the model fits at all. Pure.

Sized from the machine, and made smaller rather than failing; what cannot fit is refused before it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llaisys.config import Config
from llaisys.engine.limits import Limits
from llaisys.engine.machine import Cpus
from llaisys.engine.settings import GpuSettings, WorkerSettings
from llaisys.errors import RejectedError
from llaisys.types import ModelInfo

# The part of the available memory that K and V take if nothing is configured.
_KV_SHARE = 5
# vLLM's name of int8 ends with it.
_PER_HEAD = "_per_token_head"
# Cells are handed out in runs of so many; a cache of whole runs wastes none.
_RUN = 32
# Limits that are settings of the same name.
_AS_CONFIGURED = (
    "max_batch_size",
    "max_input_tokens",
    "max_output_tokens",
    "enable_prefix_caching",
    "kv_eviction_threshold",
    "kv_cleanup_interval_s",
    "timeout_scan_s",
    "max_queue_wait_s",
    "max_step_time_s",
    "long_prefill_token_threshold",
    "max_client_tokens_per_step",
    "max_sessions",
    "session_kv_share",
    "session_store",
)
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine and its core are made with, and the sum that led there, in one line."""

    settings: WorkerSettings
    limits: Limits
    summary: str


def size(
    config: Config,
    info: ModelInfo,
    memory_bytes: int,
    cpus: Cpus,
    *,
    gpu: GpuSettings | None = None,
    n_clients: int = 1,
) -> Capacity:
    """Sizes an engine for a machine with `memory_bytes` available and `cpus` to compute on, for `n_clients`
    clients that each have a share.

    It is kept to these unless more threads are wanted.

    On a GPU the core knows what fits: if no number of cells is configured, the settings have none, and the
    limits are those of one context until the engine is built (`Limits.with_cells`).

    Raises RejectedError, naming the setting: a bound that cannot be kept.
    """
    wanted_len = _wanted_len(config, info)
    kv_dtype = _kv_dtype(config, gpu)
    cell_bytes = info.kv_bytes_per_cell["bfloat16" if gpu else kv_dtype]
    n_seqs = _n_seqs(config)
    configured = _configured_cells(config, cell_bytes)
    if configured is not None:
        n_cells, why = configured
    elif gpu is None:
        n_cells, why = _cells_that_fit(config, info, memory_bytes, cell_bytes, n_seqs * wanted_len)
    else:
        n_cells, why = wanted_len * config.num_kv_streams, "as many as the GPU has room for"
    n_cells -= n_cells % config.num_kv_streams
    if n_cells < 1:
        if gpu is None:
            _refuse_what_does_not_fit(config, info, memory_bytes, cell_bytes)
        raise RejectedError(
            f"the KV cache has no room for a single token: one takes {cell_bytes} bytes ({why})",
            param="kv_cache_memory_bytes",
        )
    limits = Limits(
        max_num_seqs=n_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_model_len=min(wanted_len, n_cells // config.num_kv_streams),
        n_cells=n_cells,
        vocab_size=info.vocab_size,
        n_streams=config.num_kv_streams,
        kv_cell_bytes=cell_bytes,
        n_clients=n_clients,
        **{name: getattr(config, name) for name in _AS_CONFIGURED},
    )
    n_threads = config.num_threads or cpus.n
    settings = WorkerSettings(
        path=Path(info.path),
        dtype=_mode(config),
        kv_dtype=kv_dtype,
        isa=config.isa,
        n_cells=n_cells if gpu is None or configured else None,
        n_seq_max=n_seqs,
        n_batch=config.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        n_threads=n_threads,
        cpu_ids=cpus.ids if n_threads <= len(cpus.ids) else (),
        pins=cpus.pins,
        memory_nodes=cpus.memory_nodes,
        n_streams=config.num_kv_streams,
        n_ranks=config.tensor_parallel_size,
        screens_head=gpu is None and _screens_head(config),
        gpu=gpu,
    )
    if gpu is None:
        _refuse_what_does_not_fit(config, info, memory_bytes, n_cells * cell_bytes)
    weights = _mib(_weight_bytes(config, info)) if gpu is None else f"on GPU {gpu.ordinal}"
    cells = f"{cell_bytes} B ({kv_dtype})"
    if settings.n_cells is not None:
        cells = f"{n_cells} cells x {cells} = {n_cells * cell_bytes / 2**20:.1f} MiB"
    cut = f", cut from {wanted_len} to fit the cache" if limits.max_model_len < wanted_len else ""
    summary = (
        f"weights: {weights} ({_mode(config)}); KV cache: {cells} ({why}); "
        f"context {limits.max_model_len} tokens{cut}"
    )
    if config.tensor_parallel_size > 1:
        summary += f"; split over {config.tensor_parallel_size} ranks"
    return Capacity(settings, limits, summary)


def _wanted_len(config: Config, info: ModelInfo) -> int:
    if config.max_model_len is None:
        return info.max_position_embeddings
    if config.max_model_len > info.max_position_embeddings:
        raise RejectedError(
            f"max_model_len is {config.max_model_len}, the model was made for {info.max_position_embeddings}",
            param="max_model_len",
        )
    return config.max_model_len


def _n_seqs(config: Config) -> int:
    """Sequences at the same time: `max_num_seqs`, within `max_concurrent_requests`."""
    most = config.max_concurrent_requests
    if most is None:
        return config.max_num_seqs
    for name in ("max_num_seqs", "max_batch_size"):
        value = getattr(config, name)
        if name in config.model_fields_set and value is not None and value > most:
            raise RejectedError(f"{name} is {value}, more than max_concurrent_requests {most}", param=name)
    return min(config.max_num_seqs, most)


def _mode(config: Config) -> str:
    """How the core holds the weights. Raises RejectedError for two settings that contradict each other."""
    if config.quantization is None:
        return config.dtype
    if config.dtype != "auto":
        raise RejectedError(
            f"dtype {config.dtype} and quantization {config.quantization} contradict each other; give one",
            param="quantization",
        )
    return config.quantization


def _kv_dtype(config: Config, gpu: GpuSettings | None) -> str:
    """The type of K and V; on a GPU, where the weights' decides, auto stays."""
    named = config.kv_cache_dtype.removesuffix(_PER_HEAD)
    if named != "auto" or gpu is not None:
        return named
    return "float32" if config.dtype == "float32" else "bfloat16"


def _configured_cells(config: Config, cell_bytes: int) -> tuple[int, str] | None:
    """Cells by the settings, the fewest, and which says so."""
    configured = []
    if config.num_kv_cells is not None:
        configured.append((config.num_kv_cells, "num_kv_cells"))
    if config.kv_cache_memory_bytes is not None:
        n_cells = config.kv_cache_memory_bytes // cell_bytes
        configured.append((n_cells, f"of {config.kv_cache_memory_bytes} B"))
    return min(configured, default=None)


def _cells_that_fit(
    config: Config, info: ModelInfo, memory_bytes: int, cell_bytes: int, most: int
) -> tuple[int, str]:
    """Cells in the machine's memory, at most `most`, and the reason for the number."""
    weights = _weight_bytes(config, info)
    budget = max(0, memory_bytes - weights - _workspace_bytes(config, info)) // _KV_SHARE
    n_cells = budget // cell_bytes
    n_cells -= n_cells % _RUN if n_cells > _RUN else 0
    if most <= n_cells:
        n_seqs = _n_seqs(config)
        return most, f"all that {n_seqs} requests of {most // n_seqs} tokens can use"
    left = f"{memory_bytes / 2**30:.1f} GiB available, {weights / 2**30:.1f} GiB of them for weights"
    return n_cells, f"a fifth of the memory: {left}"


def _weight_bytes(config: Config, info: ModelInfo) -> int:
    """Bytes of the weights as the core packs them."""
    screen = info.screen_bytes[_mode(config)] if _screens_head(config) else 0
    return info.packed_bytes[_mode(config)] + screen


def _screens_head(config: Config) -> bool:
    return config.screen_lm_head and config.tensor_parallel_size == 1


def _workspace_bytes(config: Config, info: ModelInfo) -> int:
    """Bytes of one step's activations, and of the logits of every request that may run.

    Several ranks have a residual stream each, and say it and their parts of the logits to the others: what is
    said lies in memory twice, and the logits as every rank has gathered them.
    """
    n_ranks = config.tensor_parallel_size
    n_streams, n_logits = (2, 1) if n_ranks == 1 else (4 * n_ranks, 4 + n_ranks)
    q, kv = info.n_heads * info.d_head, info.n_kv_heads * info.d_head
    row = n_streams * info.d_model + 2 * q + 2 * kv + 3 * info.d_ff + info.d_head
    n_rows = config.max_num_batched_tokens
    n_requests = min(n_rows, config.max_num_seqs)
    return _FLOAT_BYTES * (n_rows * row + n_logits * n_requests * info.vocab_size)


def _refuse_what_does_not_fit(config: Config, info: ModelInfo, memory_bytes: int, kv_bytes: int) -> None:
    """Raises RejectedError with the sum. Memory that is not there would end the process without a word."""
    weights, workspace = _weight_bytes(config, info), _workspace_bytes(config, info)
    needed = weights + kv_bytes + workspace
    if needed <= memory_bytes:
        return
    parts = f"weights {_mib(weights)} + KV cache {_mib(kv_bytes)} + workspace {_mib(workspace)}"
    if weights + workspace >= memory_bytes:
        param, advice = "model", "take a smaller model, or one with fewer bits a weight"
    else:
        param, advice = "kv_cache_memory_bytes", "a smaller KV cache fits (--kv-cache-memory-bytes)"
    raise RejectedError(
        f"the model does not fit: {parts} = {_mib(needed)}, available are {_mib(memory_bytes)}; {advice}",
        param=param,
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"
