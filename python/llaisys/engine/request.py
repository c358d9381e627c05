"""A request inside the engine: its states, every legal move between them, and its tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from llaisys.errors import LlaisysError, RequestTimeoutError
from llaisys.types import FinishReason, RequestId, SamplingParams

_MASK64 = (1 << 64) - 1


class BrokenInvariant(AssertionError):
    """The engine's own books are wrong: a bug, which ends the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What a client submits. Times are of the engine's monotonic clock, in seconds.

    - `priority`: lower goes first. `client_id`: whom the fair share is counted for.
    - `deadline_s`: from then on the request ends with TIMEOUT, waiting or running.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival_s: float
    deadline_s: float
    client_id: str = ""
    priority: int = 0


# --- states: each holds exactly what exists in it; only Running has a sequence id ---


@dataclass(frozen=True, slots=True)
class Waiting:
    """Holds nothing native: no sequence id, no cells."""


@dataclass(frozen=True, slots=True)
class Running:
    """Holds a leased sequence id of the core."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Over, for good. `error` is set with the reasons TIMEOUT and ERROR."""

    reason: FinishReason
    stop_reason: int | None = None
    error: LlaisysError | None = None


State: TypeAlias = Waiting | Running | Finished


# --- events ---


@dataclass(frozen=True, slots=True)
class Admitted:
    """The scheduler let it in, and the core lent `seq_id`."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A sampled token ended it: reason STOP (`stop_reason`: the id of `stop_token_ids`) or LENGTH."""

    reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away or asked for the end."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed; `waited_s` seconds after arrival."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The core refused or spoilt this request's rows."""

    error: LlaisysError


Event: TypeAlias = Admitted | Completed | Cancelled | Expired | Failed


def advance(state: State, event: Event) -> State:
    """The state after an event; every pair is answered.

    Raises BrokenInvariant for a pair that cannot happen.
    """
    match state, event:
        case Waiting(), Admitted(seq_id):
            return Running(seq_id)
        case Running(), Completed(reason, stop_reason):
            return Finished(reason, stop_reason)
        case ((Waiting() | Running()), Cancelled()):
            return Finished(FinishReason.ABORT)
        case ((Waiting() | Running()), Expired(waited_s)):
            error = RequestTimeoutError(f"no answer within the time limit: ended after {waited_s:.1f} s")
            return Finished(FinishReason.TIMEOUT, error=error)
        case ((Waiting() | Running()), Failed(error)):
            return Finished(FinishReason.ERROR, error=error)
        case Finished(), Cancelled():  # a hang-up after the end: expected
            return state
    raise BrokenInvariant(f"{event!r} cannot happen in {state!r}")


def derive_seed(engine_seed: int, ordinal: int) -> int:
    """64 bits for the `ordinal`th request, if it brings no seed. Source: SplitMix64 (Steele et al. 2014)."""
    z = (engine_seed + (ordinal + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request; the engine thread owns it, the scheduler only reads it.

    - `ordinal`: place in the order of arrival. `seed`: 64 bits, of its draws.
    - `token_limit`: prompt and answer at most; also the cells reserved for it while it runs.
    - `token_ids`: prompt and answer so far. `num_computed`: how many of them have their K/V in the cells.

    Invariant: `num_computed < len(token_ids) <= token_limit` until it is finished.
    """

    source: EngineRequest
    ordinal: int
    seed: int
    token_limit: int
    num_computed: int = 0
    state: State = field(default_factory=Waiting)
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.source.prompt_token_ids)

    @property
    def request_id(self) -> RequestId:
        """The client's name for it."""
        return self.source.request_id

    @property
    def num_missing(self) -> int:
        """Tokens whose K/V are still to be computed: 1 when it is decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - len(self.source.prompt_token_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the answer."""
        eos = () if self.source.params.ignore_eos else self.source.eos_token_ids
        return (*eos, *self.source.params.stop_token_ids)

    def append(self, token_id: int) -> Completed | None:
        """Adds a sampled token; what it ends, if anything. An eos or stop id belongs to the answer's ids."""
        self.token_ids.append(token_id)
        params = self.source.params
        if not params.ignore_eos and token_id in self.source.eos_token_ids:
            return Completed(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Completed(FinishReason.STOP, stop_reason=token_id)
        if len(self.token_ids) >= self.token_limit:
            return Completed(FinishReason.LENGTH)
        return None
