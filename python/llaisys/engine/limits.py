"""Limits: the limits of an engine, and the check that a request can ever run within them. Pure.

docs/reference/limits.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llaisys.engine.request import EngineRequest
from llaisys.errors import ContextLengthError, RejectedError, UnsupportedError
from llaisys.model_info import Pooling
from llaisys.sampling_params import ALL_LOGPROBS, SamplingParams, count_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one engine. Invariant: `max_model_len` fits one KV stream, so any single request fits.

    - `max_num_seqs`: running requests. `max_num_queued_reqs`: requests that wait for capacity.
    - `max_num_queued_tokens`: prompt tokens of the requests that wait. A single waiting request may exceed
      it.
    - `max_num_batched_tokens`: tokens of one step over all requests. `max_batch_size`: requests of one step.
      If more run, the step serves the least recently served ones.
    - `long_prefill_token_threshold`: prompt tokens of one request in a step.
    - `max_client_tokens_per_step`: tokens of one client in a step. Its decodes count, and are never delayed.
    - `max_step_time_s`: predicted seconds of a step up to which prompt tokens are added to it; four times as
      many if no request decodes.
    - `max_queue_wait_s`: seconds of waiting after which a request is scheduled before all others.
    - `max_model_len`: tokens of one request, prompt and output together. `max_input_tokens`,
      `max_output_tokens`: tokens of prompt and output alone.
    - `n_cells`: KV cells, one token each, in `n_streams` KV streams of equal size.
    - `kv_eviction_threshold`: the share of the cells above which the prefix cache evicts cells, every
      `kv_cleanup_interval_s`.
    - `timeout_scan_s`: seconds between two checks of the deadlines.
    - `vocab_size`: token ids are below it. `kv_cell_bytes`: K and V of one token in every layer.
    - `max_sessions`: sessions of all clients, and saved sessions of each. `session_kv_share`: the share of
      the cells, and of the kept recurrent states, that sessions may pin.
    - `session_store`: the folder of saved sessions. With None they cannot be saved.
    - `prefix_cache_dir`: the folder of the prefix cache's disk tier, with up to `prefix_cache_disk_bytes`
      bytes of blocks. With None there is none.
    - `n_clients`: configured clients, each with a share of the above (`ClientShares`, `Shares`). With 1 there
      are no shares, even if requests name several clients.
    - `max_logprobs`: logprobs of one token in `logprobs`, `prompt_logprobs` and `logprob_token_ids`; -1 is no
      limit.
    - `state_bytes`: the recurrent state of one sequence; 0 without recurrent layers. `n_states_kept`: states
      that the prefix cache may keep. Without one it is off, and choices of a request do not share their
      prompt.
    - `max_loras`: LoRA adapters that may be loaded at the same time; 0: none.
    - `speculates`: the engine has speculative decoding, so requests may have a `prediction`.

    None means no limit in all other fields.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_model_len: int
    n_cells: int
    vocab_size: int
    max_num_queued_tokens: int | None = None
    max_batch_size: int | None = None
    long_prefill_token_threshold: int | None = None
    max_client_tokens_per_step: int | None = None
    max_step_time_s: float = 0.25
    max_queue_wait_s: float = 60.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    n_streams: int = 1
    enable_prefix_caching: bool = True
    kv_eviction_threshold: float = 1.0
    kv_cleanup_interval_s: float = 1.0
    timeout_scan_s: float = 1.0
    kv_cell_bytes: int = 0
    max_sessions: int = 256
    session_kv_share: float = 0.5
    session_store: Path | None = None
    prefix_cache_dir: Path | None = None
    prefix_cache_disk_bytes: int = 2**33
    n_clients: int = 1
    max_logprobs: int = 20
    speculates: bool = False
    state_bytes: int = 0
    n_states_kept: int = 0
    max_loras: int = 0

    def __post_init__(self) -> None:
        if self.n_cells % self.n_streams:
            raise RejectedError(
                f"{self.n_cells} KV cells cannot be divided among {self.n_streams} KV streams",
                param="num_kv_streams",
            )
        if self.max_model_len > self.n_cells_per_stream:
            of = "" if self.n_streams == 1 else f" of one of {self.n_streams} KV streams"
            raise RejectedError(
                f"max_model_len {self.max_model_len} is more than the {self.n_cells_per_stream} KV cells{of}",
                param="max_model_len",
            )

    def with_cells(self, n_cells: int) -> Limits:
        """Return these limits with `n_cells` cells and a context that fits one KV stream."""
        n_max = n_cells // self.n_streams
        return replace(self, n_cells=n_cells, max_model_len=min(self.max_model_len, n_max))

    @property
    def n_cells_per_stream(self) -> int:
        """Cells of one KV stream."""
        return self.n_cells // self.n_streams

    @property
    def n_cells_kept_free(self) -> int:
        """Cells of one KV stream that a clean-up of the prefix cache leaves free."""
        return self.n_cells_per_stream - int(self.n_cells_per_stream * self.kv_eviction_threshold)

    @property
    def n_batch_slots(self) -> int:
        """Requests that fit in one step."""
        return min(self.max_batch_size or self.max_num_seqs, self.max_num_seqs, self.max_num_batched_tokens)


# Maximum entries of `prompt_logprobs`, prompt tokens times (candidates + 1), and of `logprobs` of all choices
# if there are more than LOGPROBS_FREE candidates. An entry takes about 100 bytes until it is delivered.
PROMPT_LOGPROBS_MAX = 1 << 17
LOGPROBS_MAX = 1 << 20
LOGPROBS_FREE = 20
# Maximum such entries of all open requests of a server, prompts included; a client's only one may have more.
LOGPROBS_OPEN_MAX = 1 << 22
# If `max_logprobs` allows more, as many entries as this number of positions has.
_LARGEST_POSITIONS = 32


def token_limit(
    prompt: Sequence[int], params: SamplingParams, limits: Limits, *, pooling: Pooling | None = None
) -> int:
    """Return the length, prompt and output, at which the request ends: its worst case in KV cells.

    Without `max_tokens` it is the maximum allowed; with `pooling` there is no output. A request that can
    never run raises RejectedError or, with its length and the limit, ContextLengthError. It has an empty
    prompt, an id outside the vocabulary, or too many tokens or choices.
    """
    if not prompt:
        raise RejectedError("the prompt is empty: it needs at least one token", param="prompt")
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), limits.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids or (), limits.vocab_size)
    _check_logprobs(len(prompt), params, limits)
    _check_max("n", params.n, limits.max_num_seqs, "max_num_seqs")
    if params.prediction and not limits.speculates:
        raise UnsupportedError(
            "this engine has no speculative decoding for a prediction; set speculative_config",
            param="prediction",
        )
    if limits.max_input_tokens is not None and len(prompt) > limits.max_input_tokens:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, max_input_tokens allows at most {limits.max_input_tokens}",
            param="prompt",
        )
    if pooling is not None:
        if len(prompt) > limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the context is {limits.max_model_len}", param="prompt"
            )
        return len(prompt)
    if params.max_tokens is not None and limits.max_output_tokens is not None:
        _check_max("max_tokens", params.max_tokens, limits.max_output_tokens, "max_output_tokens")
    wanted = len(prompt) + (1 if params.max_tokens is None else params.max_tokens)
    if wanted > limits.max_model_len:
        raise ContextLengthError(
            f"the context is {limits.max_model_len} tokens, and the request asks for {wanted}: "
            f"{len(prompt)} in the prompt and {wanted - len(prompt)} for the completion",
            param="prompt" if params.max_tokens is None else "max_tokens",
        )
    if params.max_tokens is not None:
        return wanted
    n_max = limits.max_model_len if limits.max_output_tokens is None else limits.max_output_tokens
    return min(limits.max_model_len, len(prompt) + n_max)


def check_first_token(source: EngineRequest) -> None:
    """Raise RejectedError if the request's own fields forbid every possible first token.

    If only a later token has no candidate left, or because of a grammar, the request ends with the same
    error.
    """
    params = source.params
    if params.allowed_token_ids is None:
        return
    forbidden = {ids[0] for ids in source.bad_word_ids if len(ids) == 1}
    if params.min_tokens:
        forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else source.eos_token_ids)}
    if forbidden.issuperset(params.allowed_token_ids):
        others = [name for name in ("bad_words", "min_tokens") if getattr(params, name)]
        raise RejectedError(
            f"{' and '.join(['allowed_token_ids', *others])} leave no token: all allowed tokens are masked",
            param="allowed_token_ids",
        )


def _check_logprobs(n_prompt: int, params: SamplingParams, limits: Limits) -> None:
    """Raise RejectedError for more candidates than `max_logprobs`, or for more entries than fit in memory."""
    allowed, vocab_size = limits.max_logprobs, limits.vocab_size
    n_largest = vocab_size if allowed < 0 else min(allowed, vocab_size)
    n_free = _LARGEST_POSITIONS * (n_largest + 1)
    if params.prompt_logprobs is not None:
        n_top = count_logprobs("prompt_logprobs", params.prompt_logprobs, allowed, vocab_size)
        n_entries, n_max = n_prompt * (n_top + 1), max(PROMPT_LOGPROBS_MAX, n_free)
        if n_entries > n_max:
            raise RejectedError(
                f"prompt_logprobs {params.prompt_logprobs} of {n_prompt} prompt tokens are {n_entries} "
                f"entries, allowed are {n_max}: request fewer, or shorten the prompt",
                param="prompt_logprobs",
            )
    if params.logprobs is None:
        return
    if params.logprob_token_ids and params.logprobs > allowed >= 0:
        raise RejectedError(
            f"logprob_token_ids has {params.logprobs} ids, allowed are up to {allowed} (max_logprobs)",
            param="logprob_token_ids",
        )
    n_top = count_logprobs("logprobs", params.logprobs, allowed, vocab_size)
    n_tokens = params.n * (params.max_tokens or limits.max_model_len)
    n_entries, n_max = n_tokens * (n_top + 1), max(LOGPROBS_MAX, n_free)
    if n_top > LOGPROBS_FREE and n_entries > n_max:
        raise RejectedError(
            f"logprobs {params.logprobs} of {n_tokens} tokens are {n_entries} entries, allowed are {n_max}: "
            "request fewer, or set a smaller max_tokens",
            param="logprobs",
        )


def many_logprobs(n_prompt: int, params: SamplingParams, limits: Limits) -> int:
    """Return the entries of `logprobs` and `prompt_logprobs`, each if it has more than LOGPROBS_FREE
    candidates."""
    n_output = params.n * (params.max_tokens or limits.max_model_len)
    return sum(
        n_tokens * (n_top + 1)
        for requested, n_tokens in ((params.prompt_logprobs, n_prompt), (params.logprobs, n_output))
        if requested is not None
        and (n_top := limits.vocab_size if requested == ALL_LOGPROBS else requested) > LOGPROBS_FREE
    )


def _check_max(param: str, value: int, maximum: int, setting: str) -> None:
    if value > maximum:
        raise RejectedError(f"{param} is {value}, allowed are up to {maximum} ({setting})", param=param)


def _check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids:
        return
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocab_size:
            raise RejectedError(
                f"{param} contains token id {worst}, allowed are 0 to {vocab_size - 1}", param=param
            )
