"""TimelineRecorder: records what each request's time is spent on, from arrival to end, without gaps. Pure.

At submission and after each plan, the engine records the kind of time that a request spends *from now on*. It
lasts until another kind is recorded. So spans cannot overlap or leave a gap, and a request that continues to
decode has no cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from llaisys.engine.request import Request, WaitingForRemoteKvs
from llaisys.engine.scheduler import SchedulerOutput
from llaisys.outputs import RequestId
from llaisys.sampling_params import CHOICES_MAX
from llaisys.timeline import Span, SpanKind, Timeline, TimelineKey

SPANS_MAX = 256
FINISHED_MAX = 1024
# Maximum number of other requests that a span names as its cause.
NAMED_REQUESTS_MAX = 3


class _Record:
    """The marks (start, kind, by) of one request in order of time. The last one is open."""

    __slots__ = ("_counted_s", "arrival_s", "end_s", "marks", "n_accepted", "n_drafts", "seconds")

    def __init__(self, now_s: float, kind: SpanKind, by: tuple[TimelineKey, ...]) -> None:
        self.arrival_s = now_s
        self.end_s: float | None = None
        self.marks = [(now_s, kind, by)]
        self.seconds: dict[SpanKind, float] = {}
        self.n_drafts = self.n_accepted = 0
        self._counted_s = now_s  # `seconds` covers the time until here

    def add_mark(self, now_s: float, kind: SpanKind, by: tuple[TimelineKey, ...]) -> None:
        since_s, last_kind, last_by = self.marks[-1]
        if (last_kind, last_by) == (kind, by):
            return
        now_s = max(now_s, self._counted_s)
        self._count_until(now_s)
        if now_s == since_s:
            self.marks.pop()
            if self.marks and self.marks[-1][1:] == (kind, by):
                return
        self.marks.append((now_s, kind, by))
        if len(self.marks) > SPANS_MAX:
            middle = SPANS_MAX // 2
            self.marks[middle] = (self.marks[middle][0], SpanKind.FOLDED, ())
            del self.marks[middle + 1]

    def close(self, now_s: float) -> None:
        self.end_s = max(now_s, self._counted_s)
        self._count_until(self.end_s)

    def _count_until(self, now_s: float) -> None:
        kind = self.marks[-1][1]
        self.seconds[kind] = self.seconds.get(kind, 0.0) + now_s - self._counted_s
        self._counted_s = now_s

    def timeline(self, now_s: float) -> Timeline:
        end_s = max(now_s, self._counted_s) if self.end_s is None else self.end_s
        ends = [*(start_s for start_s, _, _ in self.marks[1:]), end_s]
        spans = [Span(mark[0], until_s, *mark[1:]) for mark, until_s in zip(self.marks, ends, strict=True)]
        open_kind = spans[-1].kind
        seconds = {**self.seconds, open_kind: self.seconds.get(open_kind, 0.0) + end_s - self._counted_s}
        kept = tuple(span for span in spans if span.end_s > span.start_s)
        is_over = self.end_s is not None
        return Timeline(self.arrival_s, end_s, kept, seconds, is_over, self.n_drafts, self.n_accepted)


class TimelineStore:
    """The timelines of all open requests and of the newest `FINISHED_MAX` finished ones.

    A request has at most `SPANS_MAX` spans; the middle spans of a longer timeline are folded into one.
    """

    def __init__(self) -> None:
        self._open: dict[TimelineKey, _Record] = {}
        self._decoding: dict[TimelineKey, _Record] = {}
        self._finished: OrderedDict[TimelineKey, _Record] = OrderedDict()
        self._chunk_of: TimelineKey | None = None

    def add(self, key: TimelineKey, now_s: float, behind: Iterable[TimelineKey] = ()) -> None:
        """Add a request that waits behind others; NAMED_REQUESTS_MAX of them are recorded."""
        self._open[key] = _Record(now_s, SpanKind.QUEUED, _first_keys(behind))

    def record(self, key: TimelineKey, now_s: float, kind: SpanKind, by: Iterable[TimelineKey] = ()) -> None:
        """Record what an open request's time is spent on from now on. No effect for other requests."""
        record = self._open.get(key)
        if record is None:
            return
        if kind is SpanKind.DECODE:
            self._decoding[key] = record
            record.add_mark(now_s, *self._decode_mark(key))
        else:
            self._decoding.pop(key, None)
            record.add_mark(now_s, kind, _first_keys(by))

    def record_largest_chunk(self, now_s: float, chunk_of: TimelineKey | None) -> None:
        """Record the request with the largest prompt chunk of the step, or None if the step has no chunk.

        Call it in every step. Decoding requests share the step with that chunk. Only a change has a cost.
        """
        if chunk_of == self._chunk_of:
            return
        self._chunk_of = chunk_of
        for key, record in self._decoding.items():
            record.add_mark(now_s, *self._decode_mark(key))

    def record_drafts(self, key: TimelineKey, n_drafts: int, n_accepted: int) -> None:
        """Record drafts that a step verified. No effect for a request that is not open."""
        if (record := self._open.get(key)) is not None:
            record.n_drafts += n_drafts
            record.n_accepted += n_accepted

    def end(self, key: TimelineKey, now_s: float) -> None:
        """End the request's timeline. No effect for a request that is not open."""
        record = self._open.pop(key, None)
        if record is None:
            return
        self._decoding.pop(key, None)
        record.close(now_s)
        self._finished.pop(key, None)
        self._finished[key] = record
        if len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)

    def timeline(self, key: TimelineKey, now_s: float) -> Timeline | None:
        """Return a request's timeline, up to now if it is open; None for an unknown request."""
        record = self._open.get(key) or self._finished.get(key)
        return None if record is None else record.timeline(now_s)

    def _decode_mark(self, key: TimelineKey) -> tuple[SpanKind, tuple[TimelineKey, ...]]:
        if self._chunk_of is None or self._chunk_of == key:
            return (SpanKind.DECODE, ())
        return (SpanKind.OTHER_CHUNK, (self._chunk_of,))


def _first_keys(keys: Iterable[TimelineKey]) -> tuple[TimelineKey, ...]:
    return tuple(key for key, _ in zip(keys, range(NAMED_REQUESTS_MAX), strict=False))


def key_of(request: Request) -> TimelineKey:
    """Return a choice's key: the request id, and for later choices also the index."""
    return _key(request.request_id, request.index)


def _key(request_id: RequestId, index: int) -> TimelineKey:
    return (request_id, index) if index else request_id


class TimelineRecorder:
    """Records the timelines of one engine's requests, step by step.

    The time of a step passes after its plan, so the plan is recorded when the step begins. An end has the
    time of the beginning of its step. A step that serves every running request costs one comparison.
    """

    def __init__(self) -> None:
        self.store = TimelineStore()
        # Requests that got their first token in the last step, and decode from now on.
        self._first_tokens: list[Request] = []
        self._all_served = True

    def record_arrival(self, request: Request, before: Sequence[Request]) -> None:
        """Record a submitted request and the closest of the requests ahead of it in the queue."""
        key, now_s = key_of(request), request.source.arrival_s
        self.store.add(key, now_s, map(key_of, before[-NAMED_REQUESTS_MAX:]))
        if isinstance(request.state, WaitingForRemoteKvs):
            self.store.record(key, now_s, SpanKind.REMOTE_KV)

    def record_first_token(self, request: Request) -> None:
        """Record that a request got its first token since its admission."""
        self._first_tokens.append(request)

    def record_step(
        self, plan: SchedulerOutput, requests: Mapping[int, Request], n_running: int, now_s: float
    ) -> None:
        """Record what the time of a step is spent on.

        `requests`: the open requests by ordinal. `n_running`: number of running requests after the plan.
        """
        store = self.store
        for request in self._first_tokens:
            store.record(key_of(request), now_s, SpanKind.DECODE)
        self._first_tokens.clear()
        served = [*plan.decode, *(chunk.ordinal for chunk in plan.chunks)]
        first = [key_of(requests[i]) for i in served[:NAMED_REQUESTS_MAX] if i in requests]
        for ordinal in plan.preempt:
            store.record(key_of(requests[ordinal]), now_s, SpanKind.PREEMPTED, first)
        largest = max(plan.chunks, key=lambda chunk: chunk.n_tokens, default=None)
        by = None if largest is None or largest.ordinal not in requests else key_of(requests[largest.ordinal])
        if len(served) < n_running:
            self._record_all(plan, requests, first, now_s)
        elif not self._all_served:
            for ordinal in plan.decode:
                store.record(key_of(requests[ordinal]), now_s, SpanKind.DECODE)
        self._all_served = len(served) >= n_running
        for chunk in plan.chunks:
            if chunk.ordinal in requests:
                store.record(key_of(requests[chunk.ordinal]), now_s, SpanKind.OWN_CHUNK)
        for ordinal in plan.without_cells:
            store.record(key_of(requests[ordinal]), now_s, SpanKind.KV_WAIT)
        store.record_largest_chunk(now_s, by)

    def record_drafts(self, request: Request, n_drafts: int, n_accepted: int) -> None:
        """Record drafts of a request that a step verified, and how many became output."""
        self.store.record_drafts(key_of(request), n_drafts, n_accepted)

    def record_end(self, request: Request, now_s: float) -> None:
        """Record the end of a choice."""
        self.store.end(key_of(request), now_s)

    def timelines(self, request_id: RequestId, now_s: float) -> dict[int, Timeline]:
        """Return the timelines of a request's choices, by index."""
        known = {i: self.store.timeline(_key(request_id, i), now_s) for i in range(CHOICES_MAX)}
        return {index: timeline for index, timeline in known.items() if timeline is not None}

    def _record_all(
        self,
        plan: SchedulerOutput,
        requests: Mapping[int, Request],
        first: Sequence[TimelineKey],
        now_s: float,
    ) -> None:
        """Record a step that does not serve all running requests; the others wait for it."""
        decoding, computing = set(plan.decode), {chunk.ordinal for chunk in plan.chunks}
        for ordinal, request in requests.items():
            if ordinal in decoding:
                self.store.record(key_of(request), now_s, SpanKind.DECODE)
            elif request.num_computed and ordinal not in computing:
                self.store.record(key_of(request), now_s, SpanKind.QUEUED, first)
