"""Counters and histograms as plain numbers, for `/metrics` and for people. No clock, no exporter."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Upper bounds in seconds; vLLM's, so that its dashboards draw ours.
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
END_TO_END_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


STEP_TOKENS_BOUNDS = (
    1.0,
    8.0,
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
)
# What requests ask for; vLLM's bounds of `n`.
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
# Ours: a step is milliseconds on a small model, and `max_step_time_s` on any; its phases but one are less.
STEP_BOUNDS_S = (
    0.00001, 0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# A cancel waits for the step in progress.
CANCEL_BOUNDS_S = STEP_BOUNDS_S[2:]


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """Bounds for counts of tokens, as vLLM makes them: 1, 2, 5, 10, 20, 50 ... up to the longest request."""
    bounds = []
    power = 1
    while power <= max_tokens:
        bounds += [float(m * power) for m in (1, 2, 5) if m * power <= max_tokens]
        power *= 10
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class HistogramData:
    """A histogram at one moment.

    - `bounds`: upper bounds, ascending, without +Inf.
    - `counts`: `[len(bounds) + 1]` observations of each bucket, not cumulative; the last is above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Observations in all."""
        return sum(self.counts)


NOTHING = HistogramData((), (0,), 0.0)


class Histogram:
    """Counts observations in fixed buckets. One owner."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Adds one observation, in the unit of the bounds; a value on a bound belongs to that bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def data(self) -> HistogramData:
        """The state now, as a value."""
        return HistogramData(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine after its newest step; totals count since its start.

    - `num_submitted`: requests it has taken from its inbox, refused ones included.
    - `num_queued`: requests that wait, siblings not counted, of which `max_num_queued_reqs` may.
    - `num_waiting`: all choices that wait; `waiting_by_reason`: in the queue `capacity` and `preempted`,
      outside it `sibling` (another choice's prompt), `remote_kv` (a session that is being restored).
    - `seq_ids_free`: sequences that may still run beside those that do.
    - Of the `kv_cells`, `kv_cells_used` hold what running requests use or sessions pin (`kv_cells_session`),
      `kv_cells_free` hold nothing, and the others can be evicted; the prefix cache holds `kv_cells_retained`,
      used or not.
    - `prefix_query_tokens`: prompt tokens of all admitted requests; `prefix_hit_tokens`: those found cached.
    - `step_prefill_tokens`, `step_decode_tokens`: of the newest step. `step_s`: seconds of the one before it,
      until the newest began.
    - `tokens_of_steps`: of all steps that computed something. `seconds_of_phases`: of their phases, by name
      (`tally.PHASES`); of the last one, which goes until the next step begins, only where work went on.
    - `seconds_of_cancels`: from the asking for a cancel until what was cancelled held nothing any more.
    - `num_violations`: times that the books were found wrong and the engine went on.
    - `finished`: choices by `FinishReason` value.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    num_submitted: int = 0
    num_steps: int = 0
    seq_ids_free: int = 0
    kv_cells: int = 0
    kv_cells_used: int = 0
    kv_cells_retained: int = 0
    kv_cells_free: int = 0
    kv_cells_session: int = 0
    num_sessions: int = 0
    num_preempted: int = 0
    num_violations: int = 0
    num_evicted_cells: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_s: float = 0.0
    tokens_of_steps: HistogramData = NOTHING
    seconds_of_phases: dict[str, HistogramData] = field(default_factory=dict)
    seconds_of_cancels: HistogramData = NOTHING
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """What a server reports. Totals count since the start; `finished` is requests by `FinishReason` value.

    - `engine`: its own books; its totals begin anew when it is loaded or restarted.
    - `invariant_violations`: times that an engine's books were found wrong, those that ended it included.
    - A request counts its prompt tokens when its first token arrives, and its generated tokens as they are
      shown; tokens computed after a stop string was met count nowhere.
    - Of a request that gave a token: `queue_time_s` from its arrival until it was first admitted,
      `prefill_time_s` from then to its first token, `decode_time_s` from that to its last,
      `inference_time_s` the last two together; `time_per_output_token_s` the decode time by tokens after the
      first, where there are some.
    - An embedding counts its prompt tokens, `queue_time_s` and `prefill_time_s` when it arrives.
    - Of every request that ended, in tokens: `request_prompt_tokens`, `request_generation_tokens` of all
      choices, `max_num_generation_tokens` of its longest one, `params_n` and, where it said so,
      `params_max_tokens`; of one that gave a token, `prefill_kv_computed_tokens`: its prompt's that were not
      cached.
    """

    engine: EngineStats
    prompt_tokens: int
    generation_tokens: int
    invariant_violations: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    time_to_first_token_s: HistogramData = NOTHING
    inter_token_latency_s: HistogramData = NOTHING
    time_per_output_token_s: HistogramData = NOTHING
    queue_time_s: HistogramData = NOTHING
    prefill_time_s: HistogramData = NOTHING
    decode_time_s: HistogramData = NOTHING
    inference_time_s: HistogramData = NOTHING
    e2e_request_latency_s: HistogramData = NOTHING
    request_prompt_tokens: HistogramData = NOTHING
    request_generation_tokens: HistogramData = NOTHING
    max_num_generation_tokens: HistogramData = NOTHING
    prefill_kv_computed_tokens: HistogramData = NOTHING
    params_n: HistogramData = NOTHING
    params_max_tokens: HistogramData = NOTHING
