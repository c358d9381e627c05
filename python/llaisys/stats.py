"""EngineStats, ServiceStats and RequestStats: counters and histograms as plain values. No clock, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from llaisys.outputs import RequestId, RequestOutput, RequestStateStats
from llaisys.sampling_params import SamplingParams

# Upper bounds in seconds; those of vLLM, so that its dashboards work with our metrics.
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
# vLLM's bounds for the tokens of a step.
STEP_TOKENS_BOUNDS = (
    1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0,
)  # fmt: skip
# vLLM's bounds for `n` of requests.
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
# Bounds of our own. A step takes milliseconds on a small model, and up to `max_step_time_s`; its phases take
# less.
STEP_BOUNDS_S = (
    0.00001, 0.0001, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# A cancel waits for the step in progress.
CANCEL_BOUNDS_S = STEP_BOUNDS_S[2:]


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """Return bounds for token counts, as in vLLM: 1, 2, 5, 10, 20, 50 ... up to the longest request."""
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
        """Total observations."""
        return sum(self.counts)


EMPTY_HISTOGRAM = HistogramData((), (0,), 0.0)


class Histogram:
    """Counts observations in fixed buckets. Not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observation, in the unit of the bounds. A value equal to a bound belongs to its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def data(self) -> HistogramData:
        """Return the current state as a value."""
        return HistogramData(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The stats of an engine after a step. Totals count since its start.

    A client has those after the newest step in which requests changed, or after a later one: of steps that
    only continue requests, those within `engine.loop.STATS_INTERVAL_S` may be missing.

    - `num_submitted`: requests taken from the inbox, including rejected ones.
    - `num_queued`: waiting requests, without siblings; `max_num_queued_reqs` bounds them.
      `queue_s`: predicted seconds that the prompts of all waiting requests take.
    - `num_waiting`: all waiting choices. `waiting_by_reason`: `capacity` and `preempted` in the queue,
      `sibling` (another choice's prompt) and `remote_kv` (a session or a prefix that is being loaded) outside
      it.
    - `seq_ids_free`: number of sequences that may run in addition.
    - Of the `kv_cells`, `kv_cells_used` are used by running requests or pinned by sessions
      (`kv_cells_session`), `kv_cells_free` are free, and the others can be evicted. `kv_cells_retained` are
      in the prefix cache, whether used or not.
    - `recurrent_states_cached`: recurrent states that the prefix cache keeps, at most `recurrent_states_max`.
      Both are 0 for a model without recurrent layers.
    - `prefix_query_tokens`: prompt tokens of all admitted requests. `prefix_hit_tokens`: those found in the
      cache.
    - `external_query_tokens`: prompt tokens looked up in the disk tier of the prefix cache, which are those
      not found in memory. `external_hit_tokens`: those loaded from there.
    - `step_prefill_tokens`, `step_decode_tokens`: of the newest step. `step_s`: seconds of the step
      before it, until the newest one began.
    - `tokens_of_steps`: of all steps that computed something. `seconds_of_phases`: of their phases, by name
      (`engine.stats.PHASES`). The last phase lasts until the next step begins, and counts only while work
      continues.
    - `seconds_of_cancels`: from a cancel until the canceled request held no resources.
    - `num_violations`: how often an invariant was violated and the engine continued.
    - `spec_decode_...`: speculative decoding, as in vLLM: proposals that a step verified, their tokens, and
      the accepted ones, also by position in the proposal. Empty without speculation.
    - `finished`: choices by `FinishReason` value.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0
    queue_s: float = 0.0
    num_submitted: int = 0
    num_steps: int = 0
    seq_ids_free: int = 0
    kv_cells: int = 0
    kv_cells_used: int = 0
    kv_cells_retained: int = 0
    kv_cells_free: int = 0
    kv_cells_session: int = 0
    recurrent_states_cached: int = 0
    recurrent_states_max: int = 0
    num_sessions: int = 0
    num_preempted: int = 0
    num_violations: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_evicted_cells: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    step_prefill_tokens: int = 0
    step_decode_tokens: int = 0
    step_s: float = 0.0
    tokens_of_steps: HistogramData = EMPTY_HISTOGRAM
    seconds_of_phases: dict[str, HistogramData] = field(default_factory=dict)
    seconds_of_cancels: HistogramData = EMPTY_HISTOGRAM
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """The stats of a served model. Totals count since the start.

    - `finished`: requests that ended, by `FinishReason` value.
    - `engine`: the engine's stats. Its totals start at 0 when the engine is loaded or restarted.
    - `invariant_violations`: how often an invariant of an engine was violated, including when that ended it.
    - A request counts its prompt tokens when its first token arrives, and its generated tokens as they are
      delivered. Tokens computed after a stop string are not counted.
    - Of a request that produced a token, `queue_time_s` is from its arrival until its first admission.
      `prefill_time_s` is from then until its first token, and `decode_time_s` from the first token to the
      last. `inference_time_s` is the sum of the last two. `time_per_output_token_s` is the decode time per
      token after the first, for requests with at least two.
    - An embedding counts its prompt tokens, `queue_time_s` and `prefill_time_s` when it arrives.
    - Every request that ended counts in `request_prompt_tokens`, in `request_generation_tokens` (tokens of
      all choices), in `max_num_generation_tokens` (tokens of its longest choice) and in `params_n`. It counts
      in `params_max_tokens` if it set the parameter, and in `prefill_kv_computed_tokens` (prompt tokens that
      were not cached) if it produced a token.
    """

    engine: EngineStats
    prompt_tokens: int
    generation_tokens: int
    invariant_violations: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    time_to_first_token_s: HistogramData = EMPTY_HISTOGRAM
    inter_token_latency_s: HistogramData = EMPTY_HISTOGRAM
    time_per_output_token_s: HistogramData = EMPTY_HISTOGRAM
    queue_time_s: HistogramData = EMPTY_HISTOGRAM
    prefill_time_s: HistogramData = EMPTY_HISTOGRAM
    decode_time_s: HistogramData = EMPTY_HISTOGRAM
    inference_time_s: HistogramData = EMPTY_HISTOGRAM
    e2e_request_latency_s: HistogramData = EMPTY_HISTOGRAM
    request_prompt_tokens: HistogramData = EMPTY_HISTOGRAM
    request_generation_tokens: HistogramData = EMPTY_HISTOGRAM
    max_num_generation_tokens: HistogramData = EMPTY_HISTOGRAM
    prefill_kv_computed_tokens: HistogramData = EMPTY_HISTOGRAM
    params_n: HistogramData = EMPTY_HISTOGRAM
    params_max_tokens: HistogramData = EMPTY_HISTOGRAM


@dataclass(slots=True)
class _OpenRequest:
    """One open request: its parameters, its times and its tokens."""

    n_prompt: int
    params: SamplingParams
    state: RequestStateStats
    n_cached: int = 0
    n_generated: Counter[int] = field(default_factory=Counter)  # by choice


class RequestStats:
    """Records requests from submission to end, and owns the totals.

    Single-threaded; callers pass the time.
    """

    def __init__(self, max_model_len: int) -> None:
        """`max_model_len`: tokens of the longest request, for the bounds of the token histograms."""
        self._open: dict[RequestId, _OpenRequest] = {}
        self._finished: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self._inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self._per_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self._queue = Histogram(END_TO_END_BOUNDS_S)
        self._prefill = Histogram(END_TO_END_BOUNDS_S)
        self._decode = Histogram(END_TO_END_BOUNDS_S)
        self._inference = Histogram(END_TO_END_BOUNDS_S)
        self._end_to_end = Histogram(END_TO_END_BOUNDS_S)
        bounds = token_bounds(max_model_len)
        self._prompt_sizes = Histogram(bounds)
        self._completion_sizes = Histogram(bounds)
        self._longest_choices = Histogram(bounds)
        self._computed = Histogram(bounds)
        self._params_n = Histogram(CHOICES_BOUNDS)
        self._params_max_tokens = Histogram(bounds)

    def record_submission(
        self,
        request_id: RequestId,
        n_prompt: int,
        params: SamplingParams,
        arrival_s: float,
        arrival_time: float = 0.0,
    ) -> None:
        """Record a request that was submitted at `arrival_s`, Unix time `arrival_time`."""
        state = RequestStateStats(arrival_time, arrival_s)
        self._open[request_id] = _OpenRequest(n_prompt, params, state)

    def record_tokens(self, delta: RequestOutput, now_s: float) -> None:
        """Record the new tokens of one choice; set `metrics` of `delta`, which is from OutputProcessor."""
        request = self._open.get(delta.request_id)
        if request is None:
            return
        delta.metrics = state = request.state
        completion = delta.outputs[0]
        n_tokens = len(completion.token_ids)
        if n_tokens == 0:
            return
        request.n_cached = max(request.n_cached, delta.num_cached_tokens)
        is_first, previous_s = not state.num_generation_tokens, state.last_token_ts
        state.record_tokens(n_tokens, delta.queued_s, now_s)
        if is_first:
            self._prompt_tokens += request.n_prompt
            self._first_token.observe(state.first_token_latency)
            self._queue.observe(delta.queued_s)
            self._prefill.observe(now_s - state.scheduled_ts)
        else:
            self._inter_token.observe((now_s - previous_s) / n_tokens)
        request.n_generated[completion.index] += n_tokens
        self._generation_tokens += n_tokens

    def record_pooling(self, delta: RequestOutput, now_s: float) -> None:
        """Record the embedding or the score that completes a request."""
        request = self._open.get(delta.request_id)
        if request is None:
            return
        self._prompt_tokens += request.n_prompt
        self._queue.observe(delta.queued_s)
        self._prefill.observe(now_s - request.state.queued_ts - delta.queued_s)

    def record_end(self, request_id: RequestId, reason: str, now_s: float) -> None:
        """Record a request's end. No effect for a request that is not open."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        self._finished[reason] += 1
        state = request.state
        self._end_to_end.observe(now_s - state.queued_ts)
        n_generated = request.n_generated.total()
        self._prompt_sizes.observe(request.n_prompt)
        self._completion_sizes.observe(n_generated)
        self._longest_choices.observe(max(request.n_generated.values(), default=0))
        self._params_n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self._params_max_tokens.observe(request.params.max_tokens)
        if n_generated:
            self._computed.observe(request.n_prompt - request.n_cached)
            decode_s = state.last_token_ts - state.first_token_ts
            self._decode.observe(decode_s)
            self._inference.observe(state.last_token_ts - state.scheduled_ts)
            if n_generated > 1:
                self._per_token.observe(decode_s / (n_generated - 1))

    def snapshot(self, engine: EngineStats, num_violations: int) -> ServiceStats:
        """Return all stats, including those of the engine and the number of its invariant violations."""
        return ServiceStats(
            engine=engine,
            invariant_violations=num_violations,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            time_to_first_token_s=self._first_token.data(),
            inter_token_latency_s=self._inter_token.data(),
            time_per_output_token_s=self._per_token.data(),
            queue_time_s=self._queue.data(),
            prefill_time_s=self._prefill.data(),
            decode_time_s=self._decode.data(),
            inference_time_s=self._inference.data(),
            e2e_request_latency_s=self._end_to_end.data(),
            request_prompt_tokens=self._prompt_sizes.data(),
            request_generation_tokens=self._completion_sizes.data(),
            max_num_generation_tokens=self._longest_choices.data(),
            prefill_kv_computed_tokens=self._computed.data(),
            params_n=self._params_n.data(),
            params_max_tokens=self._params_max_tokens.data(),
        )
