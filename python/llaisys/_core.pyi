"""The compiled door (crates/llaisys-py). Errors are the classes of `llaisys.errors`."""

from typing import final

import numpy as np
from numpy.typing import NDArray

__version__: str

def inspect(path: str) -> str:
    """Facts of a checkpoint from its headers: a JSON object with the fields of `types.ModelInfo`.

    `path` is a Hugging Face folder or a `.gguf` file. Checks a folder's tokenizer and template files too, as
    their readers trust them. Raises RejectedError (damaged) or UnsupportedError.
    """

def available_isas() -> list[str]:
    """Instruction sets that this machine can run, best first, of `avx512_bf16`, `avx512_vnni`, `avx512`,
    `avx2_vnni`, `avx2`, `scalar`."""

def cuda_info(folders: list[str], driver: str = ...) -> str:
    """What CUDA computes with on this machine, or why it cannot.

    A JSON object with the fields of `types.CudaInfo`. `folders`: where libraries are looked for before the
    system's loader is asked; `driver`: the driver's library.
    """

def cuda_kernel_sources() -> str:
    """The CUDA kernels, JSON: `[{unit, source, defines: {NAME: value}, kernels}]`, each kernel
    `{name, max_threads, max_registers, max_shared_bytes}`."""

def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One Philox4x32-10 block (Salmon et al. 2011), for known-answer tests."""

@final
class Gpu:
    """A GPU for a Context, and how it is used. Opening it is the Context's business.

    `folders`, `driver`: as of `cuda_info`. `ordinal`: which GPU, in the driver's order. `cubin_folder`: where
    machine code is kept; None: nowhere. `memory_share`: of the GPU's memory, more than 0 up to 1, what a
    Context without `n_cells` may fill. `synchronous`: wait after every kernel, so that an error names it.
    `overlap`: a decode step may be launched before the tokens of the one before are known.
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
    """Sampling of one sequence, checked once. See `types.SamplingParams` for the meanings.

    `stop_ids` only matter for `min_tokens`: they are masked until so many tokens are out. `top_logprobs` -1
    (the default): no logprobs; 0: the sampled token's only. `allowed_ids` empty: all may be drawn.
    `bad_words`: token sequences, none empty. `prompt_logprobs` n (-1: off): a row inside the prompt that
    wants logits gives the prompt's next token as its id, not counted as output, with its logprobs and the n
    best.
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
        prompt_logprobs: int = ...,
    ) -> SamplerSpec: ...

@final
class DecodeOutput:
    """What a decode gives. Output rows are the batch rows with flags, in batch order."""

    @property
    def rows(self) -> NDArray[np.int32]:
        """`[n_out]`: the batch row of each output row."""
    @property
    def token_ids(self) -> NDArray[np.int32]:
        """`[n_out]`: the sampled id; -1 where the row asked for no logits or is faulty."""
    @property
    def faults(self) -> list[tuple[int, str]]:
        """Output rows that could not be sampled, or that come after one in the same sequence: (batch row,
        `"non_finite"` or `"all_masked"`), ascending. These rows, and rows without output after them, are not
        committed: their sequences end before the first of them. The other sequences' rows are kept."""
    @property
    def logits(self) -> NDArray[np.float32] | None:
        """`[n_out, vocab_size]` if asked for by `return_logits` (zeros where a row asked for no logits)."""
    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """`[n_out, d_model]` final hidden states if any row asked (zeros where a row did not)."""
    @property
    def logprobs(self) -> list[tuple[int, float, int, list[tuple[int, float]]]]:
        """For rows whose sampler wants them: (index of the output row, logprob of the sampled id, its rank
        from 1, the best ids with their logprobs in falling order)."""
    @property
    def graph_refusal(self) -> str | None:
        """Why decode steps on a GPU are not launched as a graph, if one cannot be. Set on one output only."""

@final
class Snapshot:
    """All cells of sequences and cache nodes. A contiguous range is (first position, first cell, length).
    Cells are numbered over all KV streams."""

    @property
    def sequences(self) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
        """The acquired sequences by slot: (id, stream, ranges in rising position order)."""
    @property
    def nodes(self) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
        """The cache nodes by id: (id, stream, first position, ranges in rising position order)."""
    @property
    def n_free(self) -> list[int]:
        """Free cells of each stream."""

@final
class KvCache:
    """The KV bookkeeping of a Context without a model, for simulation: cells, sequence ids, cache nodes, KV
    streams. The same calls, checks and errors; see Context. Any thread may call. After a panic
    (EngineDeadError) every call raises EngineDeadError."""

    def __new__(cls, *, n_cells: int, n_seq_max: int, n_streams: int = 1, lifo: bool = False) -> KvCache:
        """Create a cache with free cells. `lifo`: the id or cell that was freed last is reused first."""
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
        """Change the cache as `Context.decode` of these rows does: the same checks, errors and cells."""
    def kv_seq_rm(self, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None: ...
    def kv_seq_keep(self, seq_id: int) -> None: ...
    def kv_seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None: ...
    def kv_seq_pos_min(self, seq_id: int) -> int: ...
    def kv_seq_pos_max(self, seq_id: int) -> int: ...
    def kv_node_cache(self, node: int, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_node_attach(self, node: int, seq_id: int, p0: int, p1: int) -> None: ...
    def kv_node_split(self, node: int, at: int, tail: int) -> None: ...
    def kv_node_trim(self, node: int, at: int) -> None: ...
    def snapshot(self) -> Snapshot: ...
    def check_integrity(self) -> None: ...
    def digest(self) -> int: ...

@final
class Progress:
    """What a context has done so far: counters that only grow. Any thread may read them, while a decode runs
    and after the context is closed; nothing waits."""

    def __new__(cls) -> Progress:
        """Of a context that is still to be loaded."""
    @property
    def loading(self) -> tuple[int, int]:
        """Bytes of weights packed so far, and of all; equal once all are, (0, 0) before it is known."""
    @property
    def argmax_pruning(self) -> tuple[int, int]:
        """Output rows whose largest logit was looked for with the head's screen, and those of them where
        it was found without the others."""
    @property
    def n_steps_begun(self) -> int:
        """Decodes that were called."""
    @property
    def n_steps_ended(self) -> int:
        """Decodes that returned, whatever with."""
    @property
    def n_layers_begun(self) -> int:
        """Layers that forward passes have reached."""
    @property
    def n_rows_committed(self) -> int:
        """Rows computed for good."""
    @property
    def n_sequences_acquired(self) -> int: ...
    @property
    def n_sequences_released(self) -> int: ...

@final
class Watchdog:
    """A native thread that decides whether the engine is stuck. It never takes the GIL and never waits; time
    in which the process did not run does not count. The first verdict stays:

    - V1 inside a decode, no layer begun for `step_s` (or `step_factor` predicted steps, if that is more)
    - V2 requests wait, none runs, and no sequence was lent for `admit_s`
    - V3 requests run, but no row was committed and no sequence returned for `commit_s` (or as V1)
    - V4 a waiting request is past its deadline by `deadline_s`
    - V5 no `beat` for `loop_s`, after the first one; the only one without a `progress`, whose engine is in
      another process

    It is readable as `verdict`, and once as a byte `1` to `5` from the socket `fileno()`. If it is not
    acknowledged within `exit_after_s` seconds, the process ends with code 70 and runs no exit handler.

    An event loop is late, and no verdict, from `late_s` without a `beat` until the next one: a byte `L`, once
    each time. While it is late, V2 and V4 do not count: it may hold the interpreter that the engine needs."""

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
        """Starts the thread. Raises RejectedError for a span that is not above 0 and at most a day."""
    def report(
        self,
        *,
        waiting: int,
        running: int,
        seconds_to_deadline: float | None = None,
        predicted_step_s: float = 0.0,
    ) -> None:
        """The engine's numbers, to be told after each of its turns: requests that wait for capacity, that
        run, seconds until the earliest deadline of a waiting one, and what the next step is thought to
        take."""
    def beat(self) -> None:
        """The event loop came round."""
    @property
    def stall_reason(self) -> str | None:
        """`V1` to `V5`, or None."""
    def fileno(self) -> int:
        """The reading end of the socket; it is closed with this object."""
    def acknowledge(self) -> None:
        """Somebody acts on the verdict: no exit."""
    def close(self) -> None:
        """Ends the thread; idempotent. The verdict stays readable."""

@final
class Context:
    """One model on one device with its KV cells. Built, used and closed on one thread; a call from another
    thread raises RejectedError. Every method except `close` raises RejectedError once closed.

    A panic in the forward pass or the sampler raises CoreFaultError: it has no side effects, and the context
    can be used again. A panic inside a change of the KV cache raises EngineDeadError, and so does every later
    call, every call in a process forked from the one that built the context, and a failure of the GPU."""

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
        lifo: bool = False,
        nan_fill: bool = False,
        gpu: Gpu | None = None,
        pins: bool = True,
        prune_argmax: bool = False,
        progress: Progress | None = None,
    ) -> Context:
        """Load the weights (GIL released); `dtype` "int8" and "int4" quantize those of a float checkpoint.

        `n_batch`: rows of one ubatch; larger batches are split. `n_ranks`: ranks that the model is split over
        (tensor parallelism). `n_threads`: compute threads of all ranks, at least one each. `n_streams`: KV
        streams of `n_cells // n_streams` cells each (it must divide); stream `s` has the cells from `s *
        n_cells // n_streams`. `pins`: with exactly as many CPUs as threads, pin each thread to a CPU.
        `prune_argmax`: keep an 8-bit copy of a head in 16 or 32 bits, which finds most greedy tokens without
        reading the whole head (one rank, on the CPU). `progress`: the counters of this context, which show
        the loading (on the CPU). For tests: `lifo` reuses what was freed last, `nan_fill` keeps NaN in every
        cell that is free or reserved.

        `gpu`: compute there, in the checkpoint's 16-bit type (bf16 for float32 and blocks). Then `n_cells`
        may be None, which fills the GPU's memory, and `isa` is ignored."""
    def close(self) -> None:
        """Free everything; idempotent."""
    @property
    def isa(self) -> str:
        """The instruction set; on a GPU its name."""
    @property
    def n_cells(self) -> int: ...
    @property
    def n_cells_free(self) -> int:
        """Cells that no sequence sees and no cache node has."""
    def n_cells_free_in(self, stream: int) -> int:
        """Free cells of one KV stream."""
    @property
    def n_seq_free(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def attention_window(self) -> int | None:
        """Positions that a row sees at most, its own included, if every layer has a sliding window: positions
        below a sequence's last + 2 - this may be removed, no later row reads them. None: some layer sees all.
        """
    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
    def seq_acquire(self, stream: int = 0) -> int:
        """Acquire a sequence id (slot and generation in one number) whose cells will be in that KV stream.
        Raises ExhaustedError if no id is free."""
    def seq_release(self, seq_id: int) -> None:
        """Release the id, its cells (those of a cache node stay in use) and its sampler. Raises RejectedError
        if the id is stale."""
    def set_sampler(
        self, seq_id: int, spec: SamplerSpec, prompt_ids: NDArray[np.int32], output_ids: NDArray[np.int32]
    ) -> None:
        """Attach a sampler to a sequence. `output_ids` are tokens already generated (after a preemption).
        Rows of a sequence without a sampler are sampled greedily. Of the ids that one decode samples for a
        sequence, the last counts as its output. Raises RejectedError for a stale id or a parameter out of its
        bounds."""
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
        """Run one forward pass for all rows (GIL released). All arrays are `[n_rows]` except `seq_ids`
        `[sum(n_seq_id)]`. `wants_output`: 1 logits and a sampled id, 2 final hidden state, 3 both.
        `logits_mask`: batch rows `[n]`, each wanting logits, and bits `[n, ceil(vocab / 32)]`, bit set =
        allowed.
        A row of several sequences is stored once and seen by all; it is sampled with the first one's sampler.
        `stream` is checked against the streams of the rows' sequences.

        Raises ExhaustedError (cells), RejectedError (a wrong row) or CoreFaultError (a panic), with no side
        effects."""
    def kv_seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove positions `p0 <= p < p1` of a sequence. Here and below a negative p0 means from the start,
        a negative p1 to the end."""
    def kv_seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let `dst` see the positions of `src` in the range: the same cells within a KV stream; across
        streams K and V are copied into newly allocated cells. Raises ExhaustedError if too few are free,
        RejectedError if `dst` has positions in the range."""
    def kv_seq_keep(self, seq_id: int) -> None:
        """Remove the cells of every other sequence. All ids stay acquired, cache nodes keep their cells."""
    def kv_seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Shift positions in the range by `delta` and rotate the stored keys. Raises RejectedError if a cell
        is shared with another sequence or cached by a node, or if a new position is taken, negative or past
        `max_model_len`."""
    def kv_seq_pos_min(self, seq_id: int) -> int:
        """Smallest position, -1 if the sequence is empty."""
    def kv_seq_pos_max(self, seq_id: int) -> int:
        """Largest position, -1 if the sequence is empty."""
    def kv_node_cache(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        """Cache the sequence's cells of positions `p0 <= p < p1` in a new node: they stay allocated after the
        sequence is released (the prefix cache). The caller chooses the node's id (0 to 2^64 - 1) and uses it
        once. A cell is in at most one node. Raises RejectedError, with no side effects: an existing node, an
        empty range, a position that the sequence lacks or that another node has."""
    def kv_node_attach(self, node: int, seq_id: int, p0: int, p1: int) -> None:
        """Let a sequence that ends at `p0` (0: it is empty) see the node's positions `p0 <= p < p1`: the same
        cells within a KV stream; across streams K and V are copied into newly allocated cells. Raises
        ExhaustedError (a copy) or RejectedError, with no side effects: an unknown node, an empty range, a
        position that the node lacks."""
    def kv_node_split(self, node: int, at: int, tail: int) -> None:
        """Leave positions below `at` in the node and move the others to the new node `tail`. Raises
        RejectedError if either part would be empty."""
    def kv_node_trim(self, node: int, at: int) -> None:
        """Remove the node's positions from `at`; from its first one, the node itself. Raises RejectedError if
        `at` is outside the node."""
    def kv_node_export(self, node: int, p0: int, p1: int) -> NDArray[np.uint8]:
        """Return K and V of the node's positions `p0 <= p < p1` (GIL released): for each layer K
        `[p1 - p0][n_kv_heads][d_head]`, then V likewise, in the cells' type, little endian. Raises
        RejectedError."""
    def kv_node_import(self, node: int, stream: int, p0: int, data: NDArray[np.uint8]) -> None:
        """Create a cache node on free cells of a stream at positions from `p0`, with the bytes that
        `kv_node_export` returned on a context of the same fingerprint (GIL released). Raises ExhaustedError
        (cells) or RejectedError, with no side effects: a known node, not the bytes of whole cells, positions
        past `max_model_len`."""
    def fingerprint(self) -> str:
        """A hash of what K and V depend on other than tokens and positions, as 32 hexadecimal digits:
        configuration, all weights (replaced ones included), dtypes, cell layout, instruction set. The same in
        every process."""
    def progress(self) -> Progress:
        """Progress counters, readable from any thread."""
    def snapshot(self) -> Snapshot:
        """All cells of sequences and cache nodes. Costs the number of contiguous ranges."""
    def digest(self) -> int:
        """A hash of the cells, the cache nodes, the acquired ids and the order of the free cells. Costs the
        size of the cache."""
    def replace_weight(self, name: str, values: NDArray[np.float32]) -> None:
        """Replace one tensor, by its name in the checkpoint, with values of the same shape. Raises
        RejectedError or UnsupportedError, with no side effects: a wrong name or shape, a block-quantized
        tensor, a model on several ranks."""
    def check_integrity(self) -> None:
        """Check every invariant of the KV cache; a panic is raised as EngineDeadError."""
