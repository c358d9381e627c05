"""Metadata of checkpoints and CUDA devices, read without loading weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

# What is computed of a prompt in place of a completion. An embedding is the mean of all final hidden states,
# the first (cls) or last of them, or their largest numbers. A score says how well a document fits a query.
Pooling: TypeAlias = Literal["mean", "last", "cls", "max", "score"]


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer metadata of a GGUF file (`tokenizer.ggml.*`)."""

    model: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    add_bos: bool
    bos: int | None
    eos: int | None
    unk: int | None
    chat_template: str | None
    scores: list[float] | None = None
    add_space_prefix: bool | None = None
    precompiled_charsmap: list[int] | None = None


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU as the driver describes it. `capability` 90 is compute capability 9.0."""

    name: str
    capability: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CudaInfo:
    """CUDA on this machine. If it cannot be used, `reason` has the cause and all else is empty.

    Versions are CUDA versions of the driver and of NVRTC ("13.0"). `libraries`: paths, or bare names that the
    system's loader found.
    """

    reason: str | None
    driver_version: str | None = None
    nvrtc_version: str | None = None
    devices: tuple[CudaDevice, ...] = ()
    libraries: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """True if kernels can be compiled and run."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Metadata of a checkpoint, read from its headers without loading the weights.

    - `weight_bytes`: size of the weights in the files.
    - `packed_bytes`: size in memory for each `dtype` setting ("auto", "float32", "bfloat16") and, of float
      checkpoints, each `quantization` ("int8", "int4").
    - `screen_bytes`: the size of the 8-bit copy of the lm_head that `screen_lm_head` adds, likewise.
    - `kv_bytes_per_cell`: KV dtype ("float32", "float16", "bfloat16", "int8") -> bytes of one cell, K and V
      of all layers.
    - `state_bytes`: size of the recurrent state of one sequence; 0 without recurrent layers.
      `recurrent_width`: activations (float32) of one row that only these layers, or the per-layer inputs
      of Gemma 4, need. `journal_width`:
      numbers (float32) that they record of one row of a sequence with drafts.
    - `generation`: fields that `generation_config.json` sets (`temperature`, `top_p`, `top_k`, `min_p`,
      `repetition_penalty`).
    - `tokenizer`: the tokenizer of a GGUF. None for a folder, which has a `tokenizer.json` instead.
    - `pooling_type`: llama.cpp's number in a GGUF, else None.
    - `skipped_tensors`: prefix of names -> number of tensors of other parts (encoders, heads that predict
      several tokens), which the text model does not use.
    - `generates`: False for a model without a head, which has no logits. `is_encoder`: True for an encoder,
      `has_score_head` for one with a classifier.
    """

    path: str
    file_format: str
    architecture: str
    dtype: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    max_position_embeddings: int
    n_parameters: int
    weight_bytes: int
    packed_bytes: dict[str, int]
    screen_bytes: dict[str, int]
    kv_bytes_per_cell: dict[str, int]
    bos_token_id: int | None
    eos_token_ids: list[int]
    generation: dict[str, Any]
    tokenizer: GgufTokenizer | None
    pooling_type: int | None = None
    skipped_tensors: dict[str, int] = field(default_factory=dict)
    generates: bool = True
    is_encoder: bool = False
    has_score_head: bool = False
    state_bytes: int = 0
    recurrent_width: int = 0
    journal_width: int = 0
