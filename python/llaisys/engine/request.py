"""Request: the engine's record of a request, with its states, every legal transition, and its tokens.
Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from llaisys.engine.engine_output import TokenLogprobs
from llaisys.errors import LlaisysError, RequestTimeoutError
from llaisys.lora_request import LoRARequest
from llaisys.model_info import Pooling
from llaisys.outputs import FinishReason, RequestId
from llaisys.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llaisys.engine.lora import LoadedLora
    from llaisys.engine.pooling import Pool
    from llaisys.engine.prefix_cache import Pin

# A request preempted this many times is admitted again only with its worst case reserved. It is then not
# preempted any more.
PREEMPTIONS_MAX = 3

_MASK64 = (1 << 64) - 1


class BrokenInvariant(AssertionError):
    """The engine's state is inconsistent, which is a bug and ends the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as a client submits it. Times are seconds of the engine's monotonic clock.

    - `priority`: lower runs first. `client_id`: the client for fair scheduling.
    - `deadline_s`: time at which the request ends with TIMEOUT, waiting or running.
    - `cache_salt`: requests share cached prefixes only with requests of the same salt.
    - `bad_word_ids`: the token sequences of `params.bad_words`.
    - `session_id`: the session that keeps the request's KV. The request waits while the session is restored.
    - `pooling`: compute an embedding or a score of the prompt; nothing is sampled. `normalize`: an embedding
      gets L2 norm 1, a classifier's output becomes a number from 0 to 1. `score_token_ids`: the score is the
      probability of the second of these next tokens, of these two. `second_segment`: where the second text
      of a pair begins, for an encoder with token types.
    - `prediction_token_ids`: the tokens of `params.prediction`, which speculation proposes.
    - `lora`: the LoRA adapter that computes it. Its `lora_int_id` identifies it in the engine.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival_s: float
    deadline_s: float
    client_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    session_id: str = ""
    pooling: Pooling | None = None
    normalize: bool = True
    score_token_ids: tuple[int, int] | None = None
    second_segment: int | None = None
    prediction_token_ids: list[int] = field(default_factory=list)
    lora: LoRARequest | None = None


# --- states: each has exactly the fields that exist in it; only Running has a sequence id ---


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue; holds no sequence id and no cells."""


@dataclass(frozen=True, slots=True)
class WaitingForRemoteKvs:
    """Its session's KV is being restored, or (with no `session_id`) its prefix is being loaded from disk.
    Outside the queue; holds no sequence id and no cells."""

    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Running:
    """Holds a sequence id of the core; its cells are in the KV stream `stream`."""

    seq_id: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    """Waiting again; keeps its token ids, holds no sequence id and no cells."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Ended. `error` is set with the reasons TIMEOUT and ERROR."""

    reason: FinishReason
    stop_reason: int | None = None
    error: LlaisysError | None = None


State: TypeAlias = Waiting | WaitingForRemoteKvs | Running | Preempted | Finished


# --- events ---


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler admitted the request, and it acquired `seq_id` in the KV stream `stream`."""

    seq_id: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """The scheduler preempted the request, because others need its cells or its sequence id."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The KV of its session is restored, or its prefix is loaded."""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The KV of its session cannot be restored."""

    error: LlaisysError


@dataclass(frozen=True, slots=True)
class Completed:
    """A sampled token ended the choice: reason STOP (`stop_reason`: the id of `stop_token_ids`) or LENGTH."""

    reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client disconnected or canceled the request."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed, `waited_s` seconds after arrival."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The core rejected this request's rows, or their result is invalid."""

    error: LlaisysError


Event: TypeAlias = Admitted | Preemption | Restored | RestoreFailed | Completed | Cancelled | Expired | Failed


def advance(state: State, event: Event) -> State:
    """Return the state after an event.

    Raises BrokenInvariant for a pair that is not legal.
    """
    match state, event:
        case ((Waiting() | Preempted()), Admitted(seq_id, stream)):
            return Running(seq_id, stream)
        case Running(), Preemption():
            return Preempted()
        case WaitingForRemoteKvs(), Restored():
            return Waiting()
        case WaitingForRemoteKvs(), RestoreFailed(error):
            return Finished(FinishReason.ERROR, error=error)
        case Running(), Completed(reason, stop_reason):
            return Finished(reason, stop_reason)
        case ((Waiting() | WaitingForRemoteKvs() | Running() | Preempted()), Cancelled()):
            return Finished(FinishReason.ABORT)
        case ((Waiting() | WaitingForRemoteKvs() | Running() | Preempted()), Expired(waited_s)):
            error = RequestTimeoutError(f"not complete within the time limit: ended after {waited_s:.1f} s")
            return Finished(FinishReason.TIMEOUT, error=error)
        case ((Waiting() | Running() | Preempted()), Failed(error)):
            return Finished(FinishReason.ERROR, error=error)
        case Finished(), Cancelled():  # a disconnect after the end is normal
            return state
    raise BrokenInvariant(f"{event!r} cannot happen in {state!r}")


def derive_seed(engine_seed: int, ordinal: int) -> int:
    """Return the default seed (64 bits) of the `ordinal`th request. Source: SplitMix64 (Steele et al.
    2014)."""
    z = (engine_seed + (ordinal + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one choice of a request. The engine thread owns it; the scheduler only reads it.

    - `ordinal`: order of arrival, which identifies it inside the engine. `index`: the choice.
    - `seed`: 64 bits, for sampling. `leader`: the choice that computes the shared prompt; None: this choice.
    - `token_limit`: maximum tokens of prompt and output, which is also its worst case in cells.
    - `token_ids`: prompt and output so far. `num_computed`: number of them with K and V in cells.
    - `num_shared`: number of computed tokens in cells shared with the prefix cache or a sibling.
    - `num_reclaimed`: number of leading tokens whose cells were freed, because no later row sees them. If it
      is not 0, no cell is shared. `window_cells`: the resulting bound on its own cells; None: no bound.
    - `num_cached`: prompt tokens that were cached at its first admission; None before. `queued_s`: seconds
      from arrival until then.
    - `prompt_logprobs`: those computed so far, from the second prompt token on; only in a leader.
    - `pool`: pooled hidden states of an embedding request; kept when it is preempted.
    - `num_accepted_prediction_tokens`, `num_rejected_prediction_tokens`: verified drafts from its prediction
      that became output, and the others.
    - `last_step`: the last step that computed a token of it. `pin`: its pinned path while it runs.
    - `lora`: its adapter, in use until it is finished.
    - `state_stops`: positions at which chunks of its prompt end, for recurrent layers; set at its admission.

    Invariants: `num_computed < len(token_ids) <= token_limit` until it is finished; `num_computed` is 0
    unless it runs.
    """

    source: EngineRequest
    ordinal: int
    seed: int
    token_limit: int
    index: int = 0
    leader: Request | None = None
    num_computed: int = 0
    num_shared: int = 0
    num_reclaimed: int = 0
    window_cells: int | None = None
    num_cached: int | None = None
    queued_s: float = 0.0
    num_preempted: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0
    last_step: int = -1
    pin: Pin | None = None
    lora: LoadedLora | None = None
    state_stops: tuple[int, ...] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pool: Pool | None = None
    state: State = field(default_factory=Waiting)
    token_ids: array[int] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = array("i", self.source.prompt_token_ids)
        eos = () if self.source.params.ignore_eos else self.source.eos_token_ids
        self.stop_ids = frozenset((*eos, *self.source.params.stop_token_ids))

    @property
    def request_id(self) -> RequestId:
        """The id set by the client."""
        return self.source.request_id

    @property
    def seq_id(self) -> int:
        """The sequence id of a running request; raises BrokenInvariant in any other state."""
        if not isinstance(self.state, Running):
            raise BrokenInvariant(f"a request in state {self.state!r} has no sequence id")
        return self.state.seq_id

    @property
    def stream(self) -> int:
        """The KV stream of a running request; raises BrokenInvariant in any other state."""
        if not isinstance(self.state, Running):
            raise BrokenInvariant(f"a request in state {self.state!r} has no KV stream")
        return self.state.stream

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.source.prompt_token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens whose K and V are not computed yet: 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_own(self) -> int:
        """Cells that only this request uses."""
        return self.num_computed - self.num_shared - self.num_reclaimed

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - len(self.source.prompt_token_ids)

    def output_from(self, start: int) -> array[int]:
        """Return the output tokens from the `start`th on, as a copy."""
        return self.token_ids[len(self.source.prompt_token_ids) + start :]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if it computes prompt logprobs, which all choices of a request share."""
        return self.leader is None and self.source.params.prompt_logprobs is not None

    @property
    def num_reusable(self) -> int:
        """Leading tokens that need no computation if they are cached.

        These are all except the last, whose logits are needed. While prompt logprobs or an embedding are
        being computed, only tokens whose rows were scored or pooled.
        """
        if self.pool is not None:
            return self.pool.num_reusable
        n_scored = len(self.prompt_logprobs)
        if self.wants_prompt_logprobs and n_scored < self.num_prompt - 1:
            return n_scored
        return len(self.token_ids) - 1

    def rows_to_score(self, start: int, end: int) -> range:
        """Return the positions in `start <= p < end` whose rows score the prompt token after them."""
        if not self.wants_prompt_logprobs:
            return range(0)
        return range(max(start, len(self.prompt_logprobs)), min(end, self.num_prompt - 1))

    def add_hidden(self, hidden: NDArray[np.float32]) -> None:
        """Pool the final hidden states `[n, d_model]` of output rows."""
        if self.pool is None:
            raise BrokenInvariant(f"request {self.ordinal} has hidden states but no pool")
        self.pool.add(hidden)

    @property
    def worst_case_reserved(self) -> bool:
        """True if its worst case in cells is reserved while it runs, so that it is not preempted again."""
        return self.num_preempted >= PREEMPTIONS_MAX

    def append_token(self, token_id: int) -> Completed | None:
        """Append a sampled token, also an eos or stop id; return the event if it ends the choice."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            source = self.source
            is_eos = token_id in source.eos_token_ids and not source.params.ignore_eos
            return Completed(FinishReason.STOP, None if is_eos else token_id)
        if len(self.token_ids) >= self.token_limit:
            return Completed(FinishReason.LENGTH)
        return None
