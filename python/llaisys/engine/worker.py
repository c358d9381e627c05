"""Worker: runs one model on the compiled core, flat arrays in and sampled token ids out.

With `encoder_worker`, this is the only importer of `llaisys._core`. A worker is built, used and closed on one
thread, which the core checks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llaisys.config import cubin_folder, cuda_library_folders
from llaisys.engine.batch import AcceptedTokens, Batch, Mask, StepResult
from llaisys.engine.engine_output import TokenLogprobs
from llaisys.engine.load_progress import model_load
from llaisys.engine.memory import GpuSettings, WorkerSettings
from llaisys.engine.prefix_cache import AddNode, CacheEdit, DropState, KeepState, SplitNode, TrimNode
from llaisys.engine.request import BrokenInvariant, Request
from llaisys.engine.sampler_arguments import sampler_arguments
from llaisys.errors import CoreFaultError, EngineDeadError, LlaisysError, RejectedError, RequestFailedError
from llaisys.model_info import CudaDevice, CudaInfo, GgufTokenizer, ModelInfo

if TYPE_CHECKING:
    from llaisys._core import Context, DecodeOutput, Gpu, Progress, SamplerSpec
    from llaisys._core import Watchdog as Watchdog

log = logging.getLogger(__name__)

# First id of the cache nodes that exist only within one call; the prefix cache numbers its nodes from 1.
_FIRST_TEMPORARY_NODE = 2**63
# Flags of `wants_output`: logits and a sampled id; the final hidden state; the row's token is a draft.
_LOGITS, _HIDDEN, _DRAFT = 1, 2, 4
_FAULTS = {
    "non_finite": "the model computed a number that is not finite for this request",
    "all_masked": "no token is allowed for this request",
}
# The request fields that can mask tokens.
_FORBIDDING = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")


class Worker:
    """Owns the core's context. Sequences are opened with their sampler and closed with their cells.

    A change of sequences or cells that fails with CoreFaultError is tried once more, because the engine has
    recorded it already. A second failure ends the engine (EngineDeadError).
    """

    def __init__(self, context: Context, make_spec: Callable[..., SamplerSpec], n_streams: int = 1) -> None:
        self._context = context
        self._make_spec = make_spec
        self._n_streams = n_streams
        self._n_temporary = 0
        # A one for each row, kept because `np.ones` takes 30 us after a step has emptied the caches.
        self._ones: NDArray[np.int32] = np.ones(0, np.int32)

    @property
    def vocab_size(self) -> int:
        """Number of logits in a row; token ids are below it."""
        return self._context.vocab_size

    @property
    def attention_window(self) -> int | None:
        """Maximum number of positions that a row sees, its own included; None: some layer sees all."""
        return self._context.attention_window

    @property
    def n_cells(self) -> int:
        """Total number of KV cells."""
        return self._context.n_cells

    @property
    def n_cells_used(self) -> int:
        """Number of KV cells in use."""
        return self._context.n_cells - self._context.n_cells_free

    @property
    def n_states_kept(self) -> int:
        """Number of cache nodes that have a recurrent state."""
        return self._context.n_states_kept

    def describe(self) -> str:
        """Return instruction set, bytes of weights and KV cells, for the log."""
        context = self._context
        return f"{context.isa}, {context.weight_bytes / 2**20:.0f} MiB of weights, {context.n_cells} KV cells"

    @property
    def n_seq_free(self) -> int:
        """Number of free sequence ids."""
        return self._context.n_seq_free

    @property
    def n_cells_free(self) -> tuple[int, ...]:
        """Number of free KV cells of each KV stream."""
        if self._n_streams == 1:
            return (self._context.n_cells_free,)
        return tuple(self._context.n_cells_free_in(stream) for stream in range(self._n_streams))

    def open_sequence(self, request: Request, stream: int = 0) -> int:
        """Acquire a sequence id in a KV stream and set the request's sampler; after an error, release it."""
        spec = self._make_spec(**sampler_arguments(request))
        ids = np.array(request.token_ids, np.int32)
        seq_id = self._context.seq_acquire(stream)
        try:
            if request.lora is not None:
                self._context.seq_set_lora(seq_id, request.lora.slot)
            self._context.set_sampler(seq_id, spec, ids[: request.num_prompt], ids[request.num_prompt :])
        except BaseException:
            self.close_sequence(seq_id)
            raise
        return seq_id

    def load_lora(self, path: str) -> tuple[int, str]:
        """Load the LoRA adapter in a folder; return its slot and the hash of its contents."""
        slot, digest, rank, n_bytes = self._context.lora_load(path)
        log.info("loaded the LoRA adapter %s: rank %d, %.1f MiB", path, rank, n_bytes / 2**20)
        return slot, digest

    def unload_lora(self, slot: int) -> None:
        """Unload the LoRA adapter in a slot, which no sequence uses."""
        self._change(self._context.lora_unload, slot)

    def close_sequence(self, seq_id: int) -> None:
        """Release a sequence id with its cells and its sampler."""
        self._change(self._context.seq_release, seq_id)

    def fork_sequence(self, source_id: int, seq_id: int, n_tokens: int) -> None:
        """Fork the first tokens of a sequence to the empty sequence `seq_id`: cells are linked in the same KV
        stream, copied to another."""
        self._change(self._context.kv_seq_cp, source_id, seq_id, 0, n_tokens)

    def sequence_end(self, seq_id: int) -> int:
        """Return the position after the last one of a sequence."""
        return self._context.kv_seq_pos_max(seq_id) + 1

    def reclaim_cells(self, seq_id: int, end: int) -> None:
        """Free the sequence's positions below `end`."""
        self._context.kv_seq_rm(seq_id, 0, end)

    def attach_nodes(self, parts: Sequence[tuple[int, int, int]], seq_id: int) -> None:
        """Append these parts (node_id, p0, p1) of the prefix cache to the sequence, linked or copied."""
        for node_id, p0, p1 in parts:
            self._change(self._context.kv_node_attach, node_id, seq_id, p0, p1)

    def relink_nodes(self, parts: Sequence[tuple[int, int, int]], seq_id: int) -> None:
        """Replace the sequence's own cells with those of these parts of the prefix cache."""
        for node_id, p0, p1 in parts:
            self._change(self._context.kv_node_relink, node_id, seq_id, p0, p1)

    def edit_cache(self, edits: Sequence[CacheEdit], seq_id: int = -1) -> None:
        """Apply edits of the prefix cache; `seq_id` is the inserted sequence."""
        for edit in edits:
            match edit:
                case AddNode(node_id, p0, p1):
                    self._change(self._context.kv_node_cache, node_id, seq_id, p0, p1)
                case SplitNode(node_id, at, tail):
                    self._change(self._context.kv_node_split, node_id, at, tail)
                case TrimNode(node_id, at):
                    self._change(self._context.kv_node_trim, node_id, at)
                case KeepState(node_id):
                    self._change(self._context.kv_node_keep_state, node_id, seq_id)
                case DropState(node_id):
                    self._change(self._context.kv_node_drop_state, node_id)

    def fingerprint(self) -> str:
        """Return a digest of everything that K and V depend on except tokens and positions.

        The first call hashes the weights.
        """
        return self._context.fingerprint()

    def export_cells(self, node_id: int, p0: int, p1: int) -> NDArray[np.uint8]:
        """Return K and V of the positions `p0 <= p < p1` of a cache node, as bytes (uint8, one dimension)."""
        return self._context.kv_node_export(node_id, p0, p1)

    def export_state(self, node_id: int) -> NDArray[np.uint8]:
        """Return the recurrent state of a cache node, as bytes (uint8, one dimension)."""
        return self._context.kv_node_export_state(node_id)

    def import_state(self, node_id: int, data: NDArray[np.uint8]) -> None:
        """Give a cache node an exported recurrent state."""
        self._change(self._context.kv_node_import_state, node_id, data)

    def import_cells(self, wanted: AddNode, stream: int, at: int, data: NDArray[np.uint8]) -> None:
        """Create the node of an edit on new cells, from exported `data` of the positions from `at` on.

        If the data begins before the node, all of it is imported, and its head is released again.
        """
        if wanted.p0 == at:
            self._change(self._context.kv_node_import, wanted.node_id, stream, at, data)
            return
        temporary = _FIRST_TEMPORARY_NODE + self._n_temporary
        self._n_temporary += 1
        self._change(self._context.kv_node_import, temporary, stream, at, data)
        self._change(self._context.kv_node_split, temporary, wanted.p0, wanted.node_id)
        self._change(self._context.kv_node_trim, temporary, at)

    def execute_model(self, batch: Batch) -> StepResult:
        """Compute all items in one decode (one FFI call, with the GIL released).

        Raises the core's errors, without side effects.
        """
        decode = batch.decode
        tokens = [request.token_ids[-1] for request in decode]
        positions = [request.num_computed for request in decode]
        seq_ids = [request.seq_id for request in decode]
        wants = bytearray(_LOGITS if request.pool is None else _HIDDEN for request in decode)
        if batch.drafts:
            at = 0
            for request in decode:
                at += 1
                if drafts := batch.drafts_of(request):
                    end, n = at + len(drafts), len(drafts)
                    tokens[at:at] = drafts
                    positions[at:at] = range(request.num_computed + 1, request.num_computed + 1 + n)
                    seq_ids[at:at] = [request.seq_id] * n
                    wants[at:at] = bytes([_LOGITS | _DRAFT]) * n
                    at = end
        for chunk in batch.chunks:
            n = len(chunk.token_ids)
            tokens += chunk.token_ids
            positions += range(chunk.start, chunk.start + n)
            seq_ids += [chunk.request.seq_id] * n
            wants += bytes(n)
            for position in chunk.scored:
                wants[position - chunk.start - n] = _LOGITS
            for position in chunk.pooled:
                wants[position - chunk.start - n] = _HIDDEN
            if chunk.samples and chunk.request.pool is None:
                wants[-1] = _LOGITS
        masks: dict[str, Any] = {"logits_mask": _masks(batch)} if batch.masks else {}
        output = self._decode(tokens, positions, seq_ids, wants, **masks)
        if output.graph_refusal is not None:
            log.warning("%s", output.graph_refusal)
        return _result(batch, output)

    def open_greedy_sequence(self) -> int:
        """Acquire a sequence id without a sampler: its rows sample the largest logit."""
        return self._context.seq_acquire(0)

    def trim_sequence(self, seq_id: int, n_tokens: int) -> None:
        """Free the sequence's positions from `n_tokens` on."""
        self._change(self._context.kv_seq_rm, seq_id, n_tokens, -1)

    def decode_greedy(
        self, tokens: list[int], positions: list[int], seq_ids: list[int], samples: list[bool]
    ) -> list[int]:
        """Decode rows of sequences without samplers; return the ids of rows that sample, in order.

        Raises the core's errors, without side effects; RequestFailedError for a row that cannot be sampled.
        """
        wants = bytes(_LOGITS if each else 0 for each in samples)
        output = self._decode(tokens, positions, seq_ids, wants)
        if output.faults:
            raise RequestFailedError(_FAULTS["non_finite"])
        ids: list[int] = output.token_ids.tolist()
        return ids

    def decode_seconds(self, n_rows: int) -> float:
        """Decode `n_rows` tokens of a temporary sequence, all with logits, and return the seconds."""
        seq_id = self.open_greedy_sequence()
        try:
            begin_s = time.perf_counter()
            self._decode([0] * n_rows, range(n_rows), [seq_id] * n_rows, bytes([_LOGITS]) * n_rows)
            return time.perf_counter() - begin_s
        finally:
            self.close_sequence(seq_id)

    def _decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        wants: bytes | bytearray,
        **masks: Any,
    ) -> DecodeOutput:
        """Decode rows of one sequence each. `wants`: the output flags of each row."""
        if len(self._ones) < len(tokens):
            self._ones = np.ones(len(tokens), np.int32)
        return self._context.decode(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            self._ones[: len(tokens)],
            np.array(seq_ids, np.int64),
            np.frombuffer(wants, np.uint8),
            **masks,
        )

    def watchdog(self, window_s: float, exit_after_s: float | None) -> Watchdog:
        """Return a watchdog of this context. `window_s`: for layers, tokens and the event loop; a sixth of it
        for the rest."""
        return core_watchdog(self._context.progress(), window_s, exit_after_s)

    def _change(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except CoreFaultError as error:
            log.warning("a change of the KV cells failed and is tried again: %s", error)
            try:
                call(*arguments)
            except CoreFaultError as again:
                raise EngineDeadError(f"a change of the KV cells failed twice: {again}") from again

    def check(self) -> None:
        """Verify the core's invariants; raises EngineDeadError if one is broken."""
        self._context.check_integrity()

    def close(self) -> None:
        """Free the context; idempotent."""
        self._context.close()


def open_worker(settings: WorkerSettings) -> Worker:
    """Load the model. Call it on the thread that will use it. Raises RejectedError or UnsupportedError."""
    from llaisys import _core  # not at the top, so that the scheduler and `--help` need no compiled core

    progress = _core.Progress()
    with model_load(settings, lambda: progress.loading):
        context = _core.Context(
            str(settings.path),
            progress=progress,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            isa=settings.isa,
            n_cells=settings.n_cells,
            n_seq_max=settings.n_seq_max,
            n_batch=settings.n_batch,
            max_model_len=settings.max_model_len,
            n_threads=settings.n_threads,
            n_streams=settings.n_streams,
            n_ranks=settings.n_ranks,
            n_states_kept=settings.n_states_kept,
            pins=settings.pins,
            prune_argmax=settings.prune_argmax,
            max_loras=settings.max_loras,
            max_lora_rank=settings.max_lora_rank,
            gpu=None if settings.gpu is None else _gpu(settings.gpu),
        )
    return Worker(context, _core.SamplerSpec, settings.n_streams)


def _gpu(settings: GpuSettings) -> Gpu:
    from llaisys import _core  # as in `open_worker`

    return _core.Gpu(
        [str(folder) for folder in cuda_library_folders()],
        ordinal=settings.ordinal,
        cubin_folder=str(cubin_folder()),
        memory_share=settings.memory_share,
        synchronous=settings.synchronous,
        overlap=settings.overlap,
    )


def loop_watchdog(window_s: float, exit_after_s: float | None) -> Watchdog:
    """Return a watchdog of the event loop only, for an engine in another process."""
    return core_watchdog(None, window_s, exit_after_s)


def core_watchdog(progress: Progress | None, window_s: float, exit_after_s: float | None) -> Watchdog:
    """Return a watchdog of a context or an encoder by its progress; None: only of the event loop."""
    from llaisys import _core  # as in `open_worker`

    short_s = window_s / 6
    return _core.Watchdog(
        progress,
        period_s=min(0.25, short_s / 2),
        step_s=window_s,
        commit_s=window_s,
        admit_s=short_s,
        deadline_s=short_s,
        late_s=short_s,
        loop_s=window_s,
        exit_after_s=exit_after_s,
    )


def available_isas() -> list[str]:
    """Return the instruction sets that this machine supports, best first."""
    from llaisys import _core  # as in `open_worker`

    return _core.available_isas()


@functools.cache
def core_digest() -> str:
    """Return the first 8 hexadecimal digits of the SHA-256 of the core's library."""
    from llaisys import _core  # as in `open_worker`

    return hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()[:8]


def cuda_info() -> CudaInfo:
    """Return the CUDA devices and libraries of this machine, or the reason why CUDA cannot be used.

    This loads the driver, which `import llaisys` never does, because CUDA does not survive a fork.
    """
    from llaisys import _core  # as in `open_worker`

    facts: dict[str, Any] = json.loads(_core.cuda_info([str(folder) for folder in cuda_library_folders()]))
    devices = tuple(CudaDevice(**device) for device in facts.pop("devices", ()))
    return CudaInfo(devices=devices, libraries=tuple(facts.pop("libraries", ())), **facts)


def inspect_model(path: Path) -> ModelInfo:
    """Return a checkpoint's metadata from its headers. Raises RejectedError (damaged) or UnsupportedError."""
    from llaisys import _core  # as in `open_worker`

    facts: dict[str, Any] = json.loads(_core.inspect(str(path)))
    tokenizer = facts.pop("tokenizer")
    return ModelInfo(**facts, tokenizer=None if tokenizer is None else GgufTokenizer(**tokenizer))


def _masks(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.uint32]] | None:
    """Return the rows with a mask `[n]`, and their bits `[n, ceil(vocab / 32)]`; None without masks."""
    masked: list[tuple[int, Mask]] = []
    row = 0
    for request in batch.decode:
        masked += enumerate(batch.masks.get(request.ordinal, ()), row)
        row += 1 + len(batch.drafts_of(request))
    for chunk in batch.chunks:
        row += len(chunk.token_ids)
        if chunk.samples:
            masked += enumerate(batch.masks.get(chunk.request.ordinal, ()), row - 1)
    if not masked:
        return None
    return np.array([row for row, _ in masked], np.int32), np.stack([bits for _, bits in masked])


def _result(batch: Batch, output: DecodeOutput) -> StepResult:
    """Convert the core's output to results by item.

    Output rows are in batch order. Those of an item are the row of its newest token and those of its drafts;
    the scored rows of a prompt, then the sampling row; or the pooled rows.
    """
    ids: list[int] = output.token_ids.tolist()
    items = list(range(len(batch.decode)))
    if batch.drafts:
        n_rows = (1 + len(batch.drafts_of(request)) for request in batch.decode)
        items = [item for item, n in enumerate(n_rows) for _ in range(n)]
    scored: set[int] = set()
    for item, chunk in enumerate(batch.chunks, len(batch.decode)):
        n_scored = len(chunk.scored)
        scored.update(range(len(items), len(items) + n_scored))
        n_sampled = int(chunk.samples) if chunk.request.pool is None else 0
        items += [item] * (n_scored + n_sampled + len(chunk.pooled))
    if len(ids) != len(items):
        raise BrokenInvariant(f"the core returned {len(ids)} ids for {len(items)} rows")
    result = StepResult(ids)
    if batch.chunks or batch.drafts:
        result.token_ids = [-1] * len(batch)
        previous = -1
        for row, (item, token_id) in enumerate(zip(items, ids, strict=True)):
            if item == previous and item < len(batch.decode):
                if token_id >= 0:
                    result.accepted.setdefault(item, AcceptedTokens()).token_ids.append(token_id)
            elif row not in scored:
                result.token_ids[item] = token_id
            previous = item
    for row, logprob, rank, top in output.logprobs:
        entry, item = TokenLogprobs(ids[row], logprob, rank, top), items[row]
        if row in scored:
            result.prompt_logprobs.setdefault(item, []).append(entry)
        elif item in result.logprobs:
            result.accepted[item].logprobs.append(entry)
        else:
            result.logprobs[item] = entry
    if output.hidden is not None:
        item_of_row = np.array(items)
        for item in dict.fromkeys(items):
            if batch.request(item).pool is not None:
                result.hidden[item] = output.hidden[item_of_row == item]
    if output.faults:
        item_of = dict(zip(output.rows.tolist(), items, strict=True))
        for batch_row, fault in output.faults:
            item = item_of[batch_row]
            result.errors[item] = _row_error(fault, batch, result, item)
    return result


def _row_error(fault: str, batch: Batch, result: StepResult, item: int) -> LlaisysError:
    """Return the error for a fault of a row. If no token is allowed, it names the request's fields."""
    request = batch.request(item)
    n_output = request.num_output + len(result.tokens(item))
    fields = [name for name in _FORBIDDING if getattr(request.source.params, name)]
    if fault == "all_masked" and fields:
        return RejectedError(
            f"{' and '.join(fields)} leave no token after {n_output} tokens of the completion: "
            "remove one of these fields, or allow more tokens",
            param=fields[0],
        )
    return RequestFailedError(_FAULTS.get(fault, fault))
