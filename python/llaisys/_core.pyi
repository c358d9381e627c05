"""The compiled core (crates/llaisys-py). Errors are the classes of `llaisys.errors`."""

from typing import final

import numpy as np
from numpy.typing import NDArray

__version__: str

def inspect(path: str) -> str:
    """Return the properties of a checkpoint: a JSON object with the fields of `model_info.ModelInfo`.

    `path` is a Hugging Face folder or a `.gguf` file. Reads only headers. Checks the tokenizer and template
    files of a folder too, because the libraries that read them trust them. Raises RejectedError (damaged) or
    UnsupportedError.
    """

def available_isas() -> list[str]:
    """Return the instruction sets that this machine can run, best first, of `avx512_bf16`, `avx512_vnni`,
    `avx512`, `avx2_vnni`, `avx2`, `scalar`."""

def cuda_info(folders: list[str], driver: str = ...) -> str:
    """Return what CUDA uses on this machine, or why CUDA cannot be used.

    The result is a JSON object with the fields of `model_info.CudaInfo`. `folders` are searched for libraries
    before the system's loader is used. `driver` is the driver's library.
    """

def cuda_kernel_sources() -> str:
    """Return the CUDA kernels as JSON: `[{module, source, defines: {NAME: value}, kernels}]`.

    Each kernel is `{name, max_threads, max_registers, max_shared_bytes}`.
    """

def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return one Philox4x32-10 block (Salmon et al. 2011), for known-answer tests."""

@final
class Gpu:
    """A GPU for a Context, and its settings. The Context opens it.

    `folders`, `driver`: as in `cuda_info`. `ordinal`: number of the GPU in the driver's order.
    `cubin_folder`: where compiled kernels are cached; None: nowhere. `memory_share`: the share of the GPU's
    memory, above 0 and up to 1, that a Context without `n_cells` may fill. `synchronous`: wait after every
    kernel, so that an error names the kernel. `overlap`: launch a decode step before the tokens of the
    previous one are known (async scheduling).
    """

    def __new__(
        cls,
        folders: list[str],
        *,
        driver: str = ...,
        ordinal: int = 0,
        cubin_folder: str | None = None,
        memory_share: float = 0.9,
        synchronous: bool = False,
        overlap: bool = True,
    ) -> Gpu: ...

@final
class SamplerSpec:
    """Sampling parameters of one sequence. See `SamplingParams` for their meanings.

    `stop_ids` are used only with `min_tokens`: they are masked until that many tokens were sampled.
    `top_logprobs`: -1 (the default) returns no logprobs, 0 only the sampled token's. `logprob_ids`: if not
    empty, these ids take the place of the best ones. `allowed_ids`: empty allows all ids. `bad_words`: token
    sequences, none of them empty. `prompt_logprobs`: with n (-1: off), a row inside the prompt that requests
    logits returns the prompt's next token with its logprob and the n best. That token does not count as
    output.
    """

    def __new__(
        cls,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        typical_p: float = 1.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: list[tuple[int, float]] = ...,
        allowed_ids: list[int] = ...,
        bad_words: list[list[int]] = ...,
        min_tokens: int = 0,
        stop_ids: list[int] = ...,
        seed: int = 0,
        choice: int = 0,
        top_logprobs: int = ...,
        logprob_ids: list[int] = ...,
        prompt_logprobs: int = ...,
    ) -> SamplerSpec: ...

@final
class Encoder:
    """One encoder on the CPU. Created, used and closed on one thread; another thread raises RejectedError."""

    def __new__(
        cls,
        path: str,
        *,
        dtype: str = "auto",
        isa: str = "auto",
        n_batch: int,
        max_model_len: int,
        n_threads: int,
        pins: bool = True,
        progress: Progress | None = None,
    ) -> Encoder:
        """Load a folder. `n_batch`: tokens of one call. `max_model_len`: tokens of one text."""

    def encode(
        self, tokens: NDArray[np.int32], types: NDArray[np.int32], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Compute whole texts, one after the other in `tokens`; the GIL is released.

        `types`: token types, as long as `tokens`, or empty for zeros. `lengths`: tokens of each text. Returns
        the final hidden states `[n, d_model]` of all rows, and the classifier's output of each text if the
        model has one.
        """

    def close(self) -> None:
        """Free all resources; idempotent."""

    @property
    def isa(self) -> str:
        """The instruction set."""
    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
    def progress(self) -> Progress:
        """Return the progress counters, readable from any thread."""

@final
class DecodeOutput:
    """The result of a decode. Output rows are the batch rows with output flags, in batch order."""

    @property
    def rows(self) -> NDArray[np.int32]:
        """`[n_out]`: the batch row of each output row."""
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """`[n_out]`: the sampled id; -1 where the row requested no logits or is faulty."""
    @property
    def faults(self) -> list[tuple[int, str]]:
        """Output rows that could not be sampled and the later output rows of the same sequences: (batch row,
        `"non_finite"` or `"all_masked"`), ascending. Neither these rows nor later rows without output are
        committed: their sequences end before the first faulty row. The rows of other sequences are kept."""
    @property
    def logits(self) -> NDArray[np.float32] | None:
        """`[n_out, vocab_size]` with `return_logits`; zeros for rows that requested no logits."""
    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """`[n_out, d_model]` final hidden states if any row requested them; zeros for rows that did not."""
    @property
    def logprobs(self) -> list[tuple[int, float, int, list[tuple[int, float]]]]:
        """For rows whose sampler requests them: (index of the output row, logprob of the sampled id, its rank
        from 1, the best ids with their logprobs in descending order)."""
    @property
    def graph_refusal(self) -> str | None:
        """Why decode steps on a GPU run without a CUDA graph, if one could not be captured. Reported once."""

@final
class Snapshot:
    """All cells of sequences and cache nodes. A contiguous range is (first position, first cell, length).
    Cells are numbered over all KV streams."""

    @property
    def sequences(self) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
        """The acquired sequences by slot: (id, stream, ranges in ascending order of positions)."""
    @property
    def nodes(self) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
        """The cache nodes by id: (id, stream, first position, ranges in ascending order of positions)."""
    @property
    def n_free(self) -> list[int]:
        """Free cells of each stream."""

@final
class KvCache:
    """The KV cache of a Context without a model, for simulation, with its calls, checks and errors. Any
    thread may call it. After a panic, every call raises EngineDeadError."""

    def __new__(
        cls,
        *,
        n_cells: int,
        n_seq_max: int,
        n_streams: int = 1,
        lifo: bool = False,
        n_states_kept: int | None = None,
    ) -> KvCache:
        """Create a free cache. `lifo`: reuse the id or cell that was freed last. `n_states_kept`: for a model
        with recurrent layers, of which so many nodes may have a state."""
    @property
    def n_cells(self) -> int: ...
    @property
    def n_cells_free(self) -> int: ...
    def n_cells_free_in(self, stream: int) -> int: ...
    @property
    def n_seq_free(self) -> int: ...
    def seq_acquire(self, stream: int = 0) -> int: ...
    def seq_release(self, seq_id: int) -> None: ...
    def extend(
        self, positions: NDArray[np.int32], n_seq_id: NDArray[np.int32], seq_ids: NDArray[np.int64]
    ) -> None:
        """Change the cache as `Context.decode` of these rows does, with the same checks, errors and cells."""
    def kv_seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None: ...
    def kv_seq_keep(self, seq_id: int) -> None: ...
    def kv_seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None: ...
    def kv_seq_pos_min(self, seq_id: int) -> int: ...
    def kv_seq_pos_max(self, seq_id: int) -> int: ...
    def kv_node_cache(self, node: int, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_node_attach(self, node: int, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_node_relink(self, node: int, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_node_keep_state(self, node: int, seq_id: int) -> None: ...
    def kv_node_drop_state(self, node: int) -> None: ...
    @property
    def n_states_kept(self) -> int: ...
    def kv_node_split(self, node: int, at: int, tail: int) -> None: ...
    def kv_node_trim(self, node: int, at: int) -> None: ...
    def snapshot(self) -> Snapshot: ...
    def check_integrity(self) -> None: ...
    def digest(self) -> int: ...

@final
class Progress:
    """Progress counters of a context, which only grow. Any thread may read them without waiting, also while a
    decode runs and after the context is closed."""

    def __new__(cls) -> Progress:
        """Create counters for a context that is loaded later."""
    @property
    def loading(self) -> tuple[int, int]:
        """Bytes of weights packed so far and in total; (0, 0) before the total is known."""
    @property
    def argmax_pruning(self) -> tuple[int, int]:
        """Output rows for which pruned argmax ran, and those for which it found the token."""
    @property
    def n_steps_begun(self) -> int:
        """Number of decodes that were called."""
    @property
    def n_steps_ended(self) -> int:
        """Number of decodes that returned or raised."""
    @property
    def n_layers_begun(self) -> int:
        """Number of layers that forward passes have begun."""
    @property
    def n_rows_committed(self) -> int:
        """Number of committed rows."""
    @property
    def n_sequences_acquired(self) -> int: ...
    @property
    def n_sequences_released(self) -> int: ...

@final
class Watchdog:
    """A native thread that detects a stalled engine. It never takes the GIL and never blocks. Time in which
    the process did not run does not count. The first stall reason is kept:

    - V1: no layer was begun for `step_s` inside a decode (or for `step_factor` predicted steps, if longer).
    - V2: requests wait, none runs, and no sequence id was acquired for `admit_s`.
    - V3: requests run, but no row was committed and no sequence id released for `commit_s` (or as V1).
    - V4: a waiting request is past its deadline by `deadline_s`.
    - V5: no `beat` for `loop_s` after the first one. Without a `progress` (the engine is in another process)
      only this reason is checked.

    The reason is available as `stall_reason`, and once as a byte `1` to `5` from the socket `fileno()`.
    Unless the stall is acknowledged within `exit_after_s` seconds, the process exits with code 70 and runs no
    exit handlers.

    The event loop is late from `late_s` without a `beat` until the next one. This is not a stall: the socket
    sends a byte `L` once each time. While the loop is late, V2 and V4 do not count, because it may hold the
    interpreter that the engine needs."""

    def __new__(
        cls,
        progress: Progress | None,
        *,
        period_s: float = 0.25,
        step_s: float = 30.0,
        admit_s: float = 5.0,
        commit_s: float = 30.0,
        deadline_s: float = 5.0,
        late_s: float = 5.0,
        loop_s: float = 30.0,
        step_factor: float = 20.0,
        exit_after_s: float | None = None,
    ) -> Watchdog:
        """Start the thread. Raises RejectedError for a time that is not above 0 and up to a day."""
    def report(
        self,
        *,
        waiting: int,
        running: int,
        seconds_to_deadline: float | None = None,
        predicted_step_s: float = 0.0,
    ) -> None:
        """Report the engine's state after each of its iterations: the numbers of waiting and running
        requests, the seconds until the earliest deadline of a waiting one, and the predicted seconds of the
        next step."""
    def beat(self) -> None:
        """Report an iteration of the event loop."""
    @property
    def stall_reason(self) -> str | None:
        """The first stall reason, `V1` to `V5`; None without a stall."""
    def fileno(self) -> int:
        """Return the reading end of the socket. It is closed with this object."""
    def acknowledge(self) -> None:
        """Acknowledge the stall, so that the process does not exit."""
    def close(self) -> None:
        """Stop the thread; idempotent. The stall reason stays readable."""

@final
class Context:
    """One model on one device with its KV cells. It is created, used and closed on one thread; a call from
    another thread raises RejectedError. After `close`, every other method raises RejectedError.

    A panic in the forward pass or the sampler raises CoreFaultError: it has no side effects, and the context
    can be used again. A panic in a change of the KV cache or a failure of the GPU raises EngineDeadError, and
    so does every later call. Every call in a process forked after the creation raises EngineDeadError too."""

    def __new__(
        cls,
        path: str,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        isa: str = "auto",
        n_cells: int | None,
        n_seq_max: int,
        n_streams: int = 1,
        n_batch: int,
        max_model_len: int,
        n_threads: int,
        n_ranks: int = 1,
        n_states_kept: int = 0,
        lifo: bool = False,
        nan_fill: bool = False,
        gpu: Gpu | None = None,
        pins: bool = True,
        prune_argmax: bool = False,
        max_loras: int = 0,
        max_lora_rank: int = 16,
        progress: Progress | None = None,
    ) -> Context:
        """Load the weights (GIL released). The `dtype`s "int8" and "int4" quantize a float checkpoint.

        - `n_batch`: rows of one ubatch; larger batches are split.
        - `n_ranks`: ranks that the model is split over (tensor parallelism).
        - `n_states_kept`: cache nodes that may have a recurrent state; without effect in other models.
        - `n_threads`: compute threads of all ranks, at least one for each.
        - `n_streams`: KV streams of `n_cells // n_streams` cells each; must divide `n_cells`. Stream `s` has
          the cells from `s * n_cells // n_streams` on.
        - `pins`: with exactly as many CPUs as threads, pin each thread to a CPU.
        - `prune_argmax`: keep an 8-bit copy of a 16- or 32-bit head, with which most greedy tokens are found
          without reading the whole head (one rank, on the CPU).
        - `max_loras`, `max_lora_rank`: bounds on loaded LoRA adapters and their ranks (one rank, on the CPU).
        - `progress`: the counters of this context, which also show the loading (on the CPU).
        - `lifo`, `nan_fill`: for tests. Reuse cells and ids that were freed last; fill every cell that is
          free or reserved with NaN.
        - `gpu`: compute on this GPU, in the checkpoint's 16-bit type (bf16 for float32 and quantized blocks).
          Then `n_cells` may be None, which fills the GPU's memory, and `isa` is ignored.
        """
    def close(self) -> None:
        """Free all resources; idempotent."""
    @property
    def isa(self) -> str:
        """The name of the instruction set or the GPU that computes."""
    @property
    def n_cells(self) -> int: ...
    @property
    def n_cells_free(self) -> int:
        """Cells that no sequence sees and no node caches."""
    def n_cells_free_in(self, stream: int) -> int:
        """Return the number of free cells of one KV stream."""
    @property
    def n_seq_free(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def attention_window(self) -> int | None:
        """The size W of the sliding window, if every layer has one; None if some layer sees all positions.
        After the last position p of a sequence, no row sees positions below p + 2 - W, so they may be
        removed."""
    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
    def seq_acquire(self, stream: int = 0) -> int:
        """Acquire a sequence id (slot and generation in one number) whose cells are in that KV stream. Raises
        ExhaustedError if no id is free."""
    def seq_release(self, seq_id: int) -> None:
        """Release the id, its cells (those of a cache node stay in use) and its sampler. Raises RejectedError
        if the id is stale."""
    def set_sampler(
        self, seq_id: int, spec: SamplerSpec, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]
    ) -> None:
        """Attach a sampler to a sequence. `output_ids` are the tokens generated so far (after a preemption).
        Rows of a sequence without a sampler are sampled greedily. The last id that a decode samples for a
        sequence counts as its output. Raises RejectedError for a parameter out of its bounds."""
    def lora_load(self, path: str) -> tuple[int, str, int, int]:
        """Load an adapter (folder or GGUF; GIL released). Return its slot, a hash of what it adds to K and
        V, its largest rank and its bytes. Raises RejectedError, UnsupportedError, ExhaustedError (slots)."""
    def lora_unload(self, slot: int) -> None:
        """Unload an adapter. Raises RejectedError while a sequence uses it."""
    def seq_set_lora(self, seq_id: int, slot: int) -> None:
        """Let a sequence without cells use an adapter until it is released. Raises RejectedError."""
    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        n_seq_id: NDArray[np.int32],
        seq_ids: NDArray[np.int64],
        wants_output: NDArray[np.uint8],
        *,
        stream: NDArray[np.uint32] | None = None,
        logits_mask: tuple[NDArray[np.int32], NDArray[np.uint32]] | None = None,
        return_logits: bool = False,
    ) -> DecodeOutput:
        """Run one forward pass for all rows (GIL released) and sample.
        All arrays are `[n_rows]`, except `seq_ids` `[sum(n_seq_id)]`. `wants_output`: flags, 1 logits and a
        sampled id, 2 final hidden state, 4 the row's token is a draft. A draft is kept if the row before it,
        of the same sequence, samples it; a rejected one has the id -1. `logits_mask`: batch rows `[n]` that
        request logits, and bits `[n, ceil(vocab / 32)]`, where a set bit allows its id. `stream` is checked
        against the streams of the rows' sequences. A row of several sequences is stored once and seen by all;
        it is sampled with the sampler of the first one.
        Raises ExhaustedError, RejectedError (a row) or CoreFaultError (a panic), with no side effects.
        """
    def kv_seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove positions `p0 <= p < p1` of a sequence. In all `kv_seq_*` methods, a negative p0 means from
        the start and a negative p1 to the end."""
    def kv_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let `dst` see the positions of `src` in the range: the same cells within a KV stream; across
        streams K and V are copied into newly allocated cells. Raises ExhaustedError if too few are free."""
    def kv_seq_keep(self, seq_id: int) -> None:
        """Remove the cells of every other sequence. All ids stay acquired, cache nodes keep their cells."""
    def kv_seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Shift positions in the range by `delta` and rotate the stored keys. Raises RejectedError if a cell
        is shared with another sequence or cached by a node, or if a new position is in use, negative or past
        `max_model_len`; UnsupportedError for a model that scales queries by position."""
    def kv_seq_pos_min(self, seq_id: int) -> int:
        """Return the smallest position; -1 if the sequence is empty."""
    def kv_seq_pos_max(self, seq_id: int) -> int:
        """Return the largest position; -1 if the sequence is empty."""
    def kv_node_cache(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        """Cache the sequence's cells of positions `p0 <= p < p1` in a new node, in which they stay allocated
        after the sequence is released (the prefix cache). The caller chooses the node's id (0 to 2^64 - 1)
        and uses it once. A cell is in at most one node.
        Raises RejectedError for an existing node or a position that is missing or already cached."""
    def kv_node_attach(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        """Let a sequence that ends at `p0` (0 if it is empty) see the node's positions `p0 <= p < p1`: the
        same cells within a KV stream; across streams K and V are copied into newly allocated cells. With
        recurrent layers, it can then be continued only from the end of a node with a state.
        Raises ExhaustedError (cells for a copy) or RejectedError (a node or a position is missing)."""
    def kv_node_relink(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        """Let a sequence see the node's cells at positions `p0 <= p < p1` in place of its own, which have the
        same contents. Its recurrent state stays. Raises RejectedError for another KV stream, too."""
    def kv_node_keep_state(self, node: int, seq_id: int) -> None:
        """Let a node have the recurrent state of a sequence that ends where the node ends; nothing is copied.
        Raises ExhaustedError if `n_states_kept` nodes have one, RejectedError for a node with another end or
        a sequence without a state."""
    def kv_node_drop_state(self, node: int) -> None:
        """Drop a node's recurrent state, if it has one. Raises RejectedError for an unknown node."""
    @property
    def n_states_kept(self) -> int: ...
    def kv_node_export_state(self, node: int) -> NDArray[np.uint8]:
        """Return a node's recurrent state (GIL released). Raises RejectedError without one."""
    def kv_node_import_state(self, node: int, data: NDArray[np.uint8]) -> None:
        """Give a node without a state the bytes of `kv_node_export_state` of a context with the same
        fingerprint (GIL released). Raises ExhaustedError as `kv_node_keep_state`, or RejectedError."""
    def kv_node_split(self, node: int, at: int, tail: int) -> None:
        """Move the positions from `at` on, and the recurrent state, to the new node `tail`; those below `at`
        stay in the node. Raises RejectedError if either part would be empty."""
    def kv_node_trim(self, node: int, at: int) -> None:
        """Remove the positions from `at` on, with the recurrent state, and the node if none is left."""
    def kv_node_export(self, node: int, p0: int, p1: int) -> NDArray[np.uint8]:
        """Return K and V of the node's positions `p0 <= p < p1` (GIL released): for each layer K
        `[p1 - p0][n_kv_heads][d_head]`, then V likewise, in the cells' type, little endian."""
    def kv_node_import(self, node: int, stream: int, p0: int, data: NDArray[np.uint8]) -> None:
        """Create a cache node on newly allocated cells of a stream, at positions from `p0`, with the bytes
        that `kv_node_export` returned in a context with the same fingerprint (GIL released).
        Raises ExhaustedError (cells) or RejectedError (an existing node, bytes of no whole cells)."""
    def fingerprint(self) -> str:
        """Return a hash of what K and V depend on other than tokens and positions: configuration, all weights
        (replaced ones included), dtypes, cell layout and instruction set or GPU architecture. It has 32
        hexadecimal digits and is the same in every process."""
    def progress(self) -> Progress:
        """Return the progress counters, which any thread may read."""
    def snapshot(self) -> Snapshot:
        """Return all cells of sequences and cache nodes, in time linear in the number of ranges."""
    def digest(self) -> int:
        """Return a hash of the cells, the cache nodes, the acquired ids and the order of the free cells."""
    def replace_weight(self, name: str, values: NDArray[np.float32]) -> None:
        """Replace one tensor, by its name in the checkpoint, with values of the same shape. Raises
        RejectedError or UnsupportedError, with no side effects: a wrong name or shape, a tensor in quantized
        blocks, a model on several ranks."""
    def check_integrity(self) -> None:
        """Check every invariant of the KV cache. Raises EngineDeadError if one is violated."""
