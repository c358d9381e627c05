"""Sizes an engine for the machine: KV cells, context length, and whether the model fits. Pure.

The KV cache is sized from the available memory; if memory is short, it gets smaller instead of failing. A
model that cannot fit is rejected before it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llaisys.config import EngineConfig, KvEventsConfig, SpeculativeConfig
from llaisys.engine.features import check_disk_tier, check_draft, kv_events_of, lora_bytes, speculation_of
from llaisys.engine.host import Cpus
from llaisys.engine.limits import Limits
from llaisys.engine.spec_decode.planner import ROWS_MAX
from llaisys.errors import RejectedError, UnsupportedError
from llaisys.model_info import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """The GPU of a context and its options; see `_core.Gpu`."""

    ordinal: int
    memory_share: float
    synchronous: bool
    overlap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The arguments of a context; the names are those of `_core.Context`.

    - `n_cells`: KV cells. None stands for as many as fit in the GPU's memory.
    - `n_states_kept`: recurrent states that cache nodes may have.
    - `max_loras`, `max_lora_rank`: bounds on LoRA adapters.
    - `shows_progress`: show a progress bar on stderr while the weights are loaded.
    - `is_encoder`: the arguments are those of `_core.Encoder`, which has no cells.
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
    # The next three are as in `host.Cpus`.
    cpu_ids: tuple[int, ...] = ()
    pins: bool = True
    memory_nodes: tuple[int, ...] = ()
    n_streams: int = 1
    n_ranks: int = 1
    n_states_kept: int = 0
    prune_argmax: bool = False
    max_loras: int = 0
    max_lora_rank: int = 16
    gpu: GpuSettings | None = None
    shows_progress: bool = False
    is_encoder: bool = False


# The KV cache takes 1/_KV_SHARE of the available memory if nothing is configured.
_KV_SHARE = 5
# Recurrent states of cached prefixes take 1/_KEPT_SHARE of it, up to _KEPT_PER_SEQUENCE for each sequence.
_KEPT_SHARE, _KEPT_PER_SEQUENCE = 10, 4
# The suffix of vLLM's name for int8.
_PER_HEAD = "_per_token_head"
# The core allocates cells in contiguous ranges of this size, so a multiple of it wastes no cell.
_RANGE_CELLS = 32
# Limits with the name and the value of a setting.
_AS_CONFIGURED = (
    "max_batch_size",
    "max_input_tokens",
    "max_output_tokens",
    "max_logprobs",
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
    "prefix_cache_dir",
    "prefix_cache_disk_bytes",
)
_FLOAT_BYTES = 4
# Sequences of a draft model: the most requests that get drafts in a step.
DRAFT_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class EngineSizing:
    """The settings and limits of an engine. `summary`: one log line with the calculation behind them."""

    settings: WorkerSettings
    limits: Limits
    summary: str
    speculation: SpeculativeConfig | None = None
    draft_settings: WorkerSettings | None = None
    kv_events: KvEventsConfig | None = None


def size_engine(
    config: EngineConfig,
    info: ModelInfo,
    memory_bytes: int,
    cpus: Cpus,
    *,
    gpu: GpuSettings | None = None,
    n_clients: int = 1,
    draft: ModelInfo | None = None,
) -> EngineSizing:
    """Size an engine for a machine.

    - `draft`: the second model of speculative decoding.
    - `memory_bytes`: available memory. `n_clients`: clients that share the engine.
    - `cpus`: the CPUs to compute on. The engine is bound to them unless more threads are configured.

    On a GPU, the core determines how many cells fit. Unless a number is configured, the settings have none,
    and the limits assume one context of the maximum length until the engine is built (`Limits.with_cells`).

    Raises RejectedError or UnsupportedError naming the setting that cannot be satisfied.
    """
    speculation = speculation_of(config, draft, on_gpu=gpu is not None)
    check_disk_tier(config, info)
    adapter_bytes = lora_bytes(config, info, on_gpu=gpu is not None)
    memory_bytes = max(0, memory_bytes - adapter_bytes)
    requested_len = _requested_len(config, info)
    kv_dtype = _kv_dtype(config, gpu)
    cell_bytes = info.kv_bytes_per_cell["bfloat16" if gpu else kv_dtype]
    draft_cell_bytes = 0
    if draft is not None:
        check_draft(draft, info)
        draft_cell_bytes = draft.kv_bytes_per_cell[kv_dtype]
        memory_bytes = max(0, memory_bytes - draft.packed_bytes["auto"])
    n_seqs = _n_seqs(config, info, memory_bytes)
    n_kept = _n_states_kept(config, info, memory_bytes, n_seqs)
    # A step writes a new state of each of its sequences before the old one is dropped.
    state_bytes = (2 * n_seqs + n_kept) * info.state_bytes
    memory_bytes = max(0, memory_bytes - state_bytes)
    configured, setting = _configured_cells(config, cell_bytes), "kv_cache_memory_bytes"
    if configured is not None:
        n_cells, setting = configured
        why = f"{setting} {getattr(config, setting)}"
    elif gpu is None:
        all_bytes = cell_bytes + draft_cell_bytes
        n_cells, why = _cells_that_fit(config, info, memory_bytes, all_bytes, (n_seqs, requested_len))
    else:
        n_cells, why = requested_len * config.num_kv_streams, "as many as fit on the GPU"
    n_cells -= n_cells % config.num_kv_streams
    if n_cells < 1:
        if gpu is None:
            _check_fits(config, info, memory_bytes, cell_bytes)
        raise RejectedError(
            f"the KV cache has no cell for each of {config.num_kv_streams} KV streams: a cell has "
            f"{cell_bytes} bytes ({why}); increase --{setting.replace('_', '-')}",
            param=setting,
        )
    limits = Limits(
        max_num_seqs=n_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_model_len=min(requested_len, n_cells // config.num_kv_streams),
        n_cells=n_cells,
        vocab_size=info.vocab_size,
        n_streams=config.num_kv_streams,
        kv_cell_bytes=cell_bytes,
        n_clients=n_clients,
        speculates=speculation is not None,
        max_loras=config.max_loras if config.enable_lora else 0,
        state_bytes=info.state_bytes,
        n_states_kept=n_kept,
        # A prefix ends where a state is kept.
        enable_prefix_caching=config.enable_prefix_caching and bool(n_kept or not info.state_bytes),
        **{name: getattr(config, name) for name in _AS_CONFIGURED},
    )
    n_threads = config.num_threads or cpus.n
    settings = WorkerSettings(
        path=Path(info.path),
        dtype=_weight_format(config),
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
        n_states_kept=n_kept,
        prune_argmax=gpu is None and _prunes_argmax(config),
        max_loras=limits.max_loras,
        max_lora_rank=config.max_lora_rank,
        gpu=gpu,
    )
    if gpu is None:
        _check_fits(config, info, memory_bytes, n_cells * (cell_bytes + draft_cell_bytes))
    weights = _mib(_weight_bytes(config, info)) if gpu is None else f"on GPU {gpu.ordinal}"
    cells = f"{cell_bytes} B ({kv_dtype})"
    if settings.n_cells is not None:
        cells = f"{n_cells} cells x {cells} = {n_cells * cell_bytes / 2**20:.1f} MiB"
    cut = f", cut from {requested_len} to fit the cache" if limits.max_model_len < requested_len else ""
    summary = (
        f"weights: {weights} ({_weight_format(config)}); KV cache: {cells} ({why}); "
        f"context {limits.max_model_len} tokens{cut}"
    )
    if info.state_bytes:
        kept = f" and {n_kept} cached prefixes" if n_kept else ", without a prefix cache"
        summary += f"; recurrent states of {n_seqs} requests{kept}: {_mib(state_bytes)}"
    if adapter_bytes:
        summary += f"; up to {config.max_loras} LoRA adapters: {_mib(adapter_bytes)}"
    if config.tensor_parallel_size > 1:
        summary += f"; split over {config.tensor_parallel_size} ranks"
    draft_settings = None
    if draft is not None:
        draft_settings = replace(
            settings,
            path=Path(draft.path),
            dtype="auto",
            n_cells=n_cells,
            n_seq_max=DRAFT_SEQUENCES,
            max_model_len=min(limits.max_model_len, draft.max_position_embeddings),
            n_streams=1,
            n_ranks=1,
            prune_argmax=False,
            max_loras=0,
        )
        summary += f"; draft model {draft.path} with {n_cells} cells"
    return EngineSizing(settings, limits, summary, speculation, draft_settings, kv_events_of(config, info))


def size_encoder(
    config: EngineConfig, info: ModelInfo, memory_bytes: int, cpus: Cpus, *, n_clients: int = 1
) -> EngineSizing:
    """Size an engine for an encoder, as `size_engine`. It has no KV cells, so a step has space for any text.

    Raises RejectedError or UnsupportedError naming the setting that cannot be satisfied.
    """
    speculation = config.speculative_config
    unsupported = {
        "quantization": config.quantization is not None,
        "speculative_config": speculation is not None and speculation.method not in ("auto", "none"),
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "kv_events_config": kv_events_of(config, info) is not None,
        "prefix_cache_dir": config.prefix_cache_dir is not None,
        "enable_lora": config.enable_lora,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise UnsupportedError(f"{name} is not supported for an encoder; leave it out", param=name)
    max_model_len = _requested_len(config, info)
    n_batch = max(config.max_num_batched_tokens, max_model_len)
    limits = Limits(
        max_num_seqs=_n_seqs_configured(config),
        max_num_batched_tokens=n_batch,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_model_len=max_model_len,
        n_cells=n_batch,
        vocab_size=info.vocab_size,
        n_clients=n_clients,
        **{name: getattr(config, name) for name in _AS_CONFIGURED},
    )
    n_threads = config.num_threads or cpus.n
    settings = WorkerSettings(
        path=Path(info.path),
        dtype=config.dtype,
        kv_dtype="float32",
        isa=config.isa,
        n_cells=None,
        n_seq_max=limits.max_num_seqs,
        n_batch=n_batch,
        max_model_len=max_model_len,
        n_threads=n_threads,
        cpu_ids=cpus.ids if n_threads <= len(cpus.ids) else (),
        pins=cpus.pins,
        memory_nodes=cpus.memory_nodes,
        is_encoder=True,
    )
    weights = info.packed_bytes[config.dtype]
    workspace = _FLOAT_BYTES * n_batch * (9 * info.d_model + info.d_ff + 2 * info.d_head)
    if weights + workspace > memory_bytes:
        raise RejectedError(
            f"the model does not fit: weights {_mib(weights)} + workspace {_mib(workspace)}, available: "
            f"{_mib(memory_bytes)}; use a smaller model, or a smaller max_model_len",
            param="model",
        )
    summary = f"weights: {_mib(weights)} ({config.dtype}); an encoder; texts of up to {max_model_len} tokens"
    return EngineSizing(settings, limits, summary)


def _requested_len(config: EngineConfig, info: ModelInfo) -> int:
    if config.max_model_len is None:
        return info.max_position_embeddings
    if config.max_model_len > info.max_position_embeddings:
        raise RejectedError(
            f"max_model_len is {config.max_model_len}, but the model supports {info.max_position_embeddings}",
            param="max_model_len",
        )
    return config.max_model_len


def _n_seqs(config: EngineConfig, info: ModelInfo, memory_bytes: int) -> int:
    """Return the number of concurrent sequences: `max_num_seqs`, up to `max_concurrent_requests`.

    The default of `max_num_seqs` is lowered until recurrent states take 1/_KV_SHARE of the memory.
    """
    n_seqs = _n_seqs_configured(config)
    if not info.state_bytes or "max_num_seqs" in config.model_fields_set:
        return n_seqs
    budget = max(0, memory_bytes - _weight_bytes(config, info)) // _KV_SHARE
    return max(1, min(n_seqs, budget // (2 * info.state_bytes)))


def _n_states_kept(config: EngineConfig, info: ModelInfo, memory_bytes: int, n_seqs: int) -> int:
    """Return the number of recurrent states that the prefix cache may keep."""
    if not info.state_bytes or not config.enable_prefix_caching:
        return 0
    budget = max(0, memory_bytes - _weight_bytes(config, info)) // _KEPT_SHARE
    return min(_KEPT_PER_SEQUENCE * n_seqs, budget // info.state_bytes)


def _n_seqs_configured(config: EngineConfig) -> int:
    most = config.max_concurrent_requests
    if most is None:
        return config.max_num_seqs
    for name in ("max_num_seqs", "max_batch_size"):
        value = getattr(config, name)
        if name in config.model_fields_set and value is not None and value > most:
            raise RejectedError(f"{name} is {value}, more than max_concurrent_requests {most}", param=name)
    return min(config.max_num_seqs, most)


def _weight_format(config: EngineConfig) -> str:
    """Return the weight format. Raises RejectedError if dtype and quantization contradict each other."""
    if config.quantization is None:
        return config.dtype
    if config.dtype != "auto":
        raise RejectedError(
            f"dtype {config.dtype} and quantization {config.quantization} contradict each other; set one",
            param="quantization",
        )
    return config.quantization


def _kv_dtype(config: EngineConfig, gpu: GpuSettings | None) -> str:
    """Return the dtype of K and V; `auto` on a GPU, where the dtype of the weights decides."""
    requested = config.kv_cache_dtype.removesuffix(_PER_HEAD)
    if requested != "auto" or gpu is not None:
        return requested
    return "float32" if config.dtype == "float32" else "bfloat16"


def _configured_cells(config: EngineConfig, cell_bytes: int) -> tuple[int, str] | None:
    """Return the lowest number of cells that a setting allows, and its name; None if none is set."""
    configured = []
    if config.num_kv_cells is not None:
        configured.append((config.num_kv_cells, "num_kv_cells"))
    if config.kv_cache_memory_bytes is not None:
        n_cells = config.kv_cache_memory_bytes // cell_bytes
        configured.append((n_cells, "kv_cache_memory_bytes"))
    return min(configured, default=None)


def _cells_that_fit(
    config: EngineConfig, info: ModelInfo, memory_bytes: int, cell_bytes: int, requests: tuple[int, int]
) -> tuple[int, str]:
    """Return the number of cells that fit in memory, and the reason for that number.

    `requests`: how many requests run, and the tokens of each; there are no more cells than these need.
    """
    n_seqs, n_tokens = requests
    weights = _weight_bytes(config, info)
    budget = max(0, memory_bytes - weights - _workspace_bytes(config, info)) // _KV_SHARE
    n_cells = budget // cell_bytes
    n_cells -= n_cells % _RANGE_CELLS if n_cells > _RANGE_CELLS else 0
    if n_seqs * n_tokens <= n_cells:
        return n_seqs * n_tokens, f"enough for {n_seqs} requests of {n_tokens} tokens"
    available = f"{memory_bytes / 2**30:.1f} GiB available, {weights / 2**30:.1f} GiB of it for weights"
    return n_cells, f"a fifth of the memory: {available}"


def _weight_bytes(config: EngineConfig, info: ModelInfo) -> int:
    """Return the bytes of the packed weights, with the copy of the lm_head for pruned argmax."""
    n_bytes = info.packed_bytes[_weight_format(config)]
    return n_bytes + (info.screen_bytes[_weight_format(config)] if _prunes_argmax(config) else 0)


def _prunes_argmax(config: EngineConfig) -> bool:
    return config.screen_lm_head and config.tensor_parallel_size == 1


def _workspace_bytes(config: EngineConfig, info: ModelInfo) -> int:
    """Return the bytes of one step's activations, and of the logits of all requests that may run.

    With several ranks, each rank has a residual stream and sends it and its part of the logits to the others.
    Messages are in memory twice, and every rank gathers the logits.
    """
    n_ranks = config.tensor_parallel_size
    n_streams, n_logits = (2, 1) if n_ranks == 1 else (4 * n_ranks, 4 + n_ranks)
    q, kv = info.n_heads * info.d_head, info.n_kv_heads * info.d_head
    row = n_streams * info.d_model + 2 * q + 2 * kv + 3 * info.d_ff + info.d_head + info.recurrent_width
    n_rows = config.max_num_batched_tokens
    n_requests = min(n_rows, config.max_num_seqs)
    # A step with drafts has at most ROWS_MAX rows, each of which is an output.
    n_verified = min(n_rows, ROWS_MAX) if speculation_of(config, None, on_gpu=False) else 0
    n_recorded = n_verified * info.journal_width
    n_outputs = max(n_requests, n_verified)
    return _FLOAT_BYTES * (n_rows * row + n_recorded + n_logits * n_outputs * info.vocab_size)


def _check_fits(config: EngineConfig, info: ModelInfo, memory_bytes: int, kv_bytes: int) -> None:
    """Raise RejectedError if the model does not fit. Otherwise the kernel would kill the process silently."""
    weights, workspace = _weight_bytes(config, info), _workspace_bytes(config, info)
    needed = weights + kv_bytes + workspace
    if needed <= memory_bytes:
        return
    parts = f"weights {_mib(weights)} + KV cache {_mib(kv_bytes)} + workspace {_mib(workspace)}"
    if weights + workspace >= memory_bytes:
        param, advice = "model", "use a smaller model, or one with fewer bits per weight"
    else:
        param, advice = "kv_cache_memory_bytes", "set a smaller KV cache with --kv-cache-memory-bytes"
    raise RejectedError(
        f"the model does not fit: {parts} = {_mib(needed)}, available: {_mib(memory_bytes)}; {advice}",
        param=param,
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.1f} MiB"
