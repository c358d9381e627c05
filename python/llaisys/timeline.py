"""Timeline: what a request's time was spent on, as plain values (spans without gaps). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from llaisys.outputs import RequestId

# A request id, or (request id, choice).
TimelineKey: TypeAlias = RequestId | tuple[RequestId, int]


class SpanKind(str, Enum):
    """What a span of time was spent on. If other requests are the cause, the span's `by` names them."""

    QUEUED = "queued"  # by: the requests ahead
    OWN_CHUNK = "own_chunk"  # its own prompt was computed
    OTHER_CHUNK = "other_chunk"  # its step also computed a prompt chunk; by: the largest one's request
    DECODE = "decode"
    PREEMPTED = "preempted"  # by: the requests served instead
    KV_WAIT = "kv_wait"  # waited for KV cells
    REMOTE_KV = "remote_kv"  # a saved prefix was being restored
    SLOW_READER = "slow_reader"  # its tokens were ready, but the client did not read them
    FOLDED = "folded"  # the middle of a long timeline; `seconds` still counts its kinds


@dataclass(frozen=True, slots=True)
class Span:
    """One request spent the time `start_s <= t < end_s` on `kind`."""

    start_s: float
    end_s: float
    kind: SpanKind
    by: tuple[TimelineKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request's time: `spans` without gaps from `arrival_s` to `end_s`.

    `seconds`: the sum of all spans of each kind, including the folded ones. `is_over`: the request has ended.
    """

    arrival_s: float
    end_s: float
    spans: tuple[Span, ...]
    seconds: dict[SpanKind, float]
    is_over: bool
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def with_reader_lags(timeline: Timeline, lags: Sequence[tuple[float, float]]) -> Timeline:
    """Return the timeline with the times in which the client left tokens unread.

    `lags`: (start, end) of those times, in order and not overlapping. Decoding during a lag counts as
    SLOW_READER, because the client did not read its tokens; other kinds stay. A lag that outlasts the
    engine's part extends the timeline.
    """
    if not lags:
        return timeline
    spans: list[Span] = []
    for span in timeline.spans:
        shown = (
            [*_split_by_lags(span, lags)] if span.kind in (SpanKind.DECODE, SpanKind.OTHER_CHUNK) else [span]
        )
        spans += shown
    end_s = timeline.end_s
    if lags and lags[-1][1] > end_s:
        begin_s, end_s = max(lags[-1][0], end_s), lags[-1][1]
        if begin_s > timeline.end_s:  # an end has the time of the beginning of its step
            spans.append(Span(timeline.end_s, begin_s, SpanKind.DECODE))
        spans.append(Span(begin_s, end_s, SpanKind.SLOW_READER))
    seconds = dict(timeline.seconds)
    for sign, each in ((-1, timeline.spans), (1, spans)):
        for span in each:
            if span.kind is not SpanKind.FOLDED:
                seconds[span.kind] = seconds.get(span.kind, 0.0) + sign * (span.end_s - span.start_s)
    seconds = {kind: max(0.0, each) for kind, each in seconds.items()}  # sums are rounded
    return replace(timeline, end_s=end_s, spans=tuple(spans), seconds=seconds)


def _split_by_lags(span: Span, lags: Sequence[tuple[float, float]]) -> Iterable[Span]:
    at_s = span.start_s
    for begin_s, end_s in lags:
        begin_s, end_s = max(begin_s, at_s), min(end_s, span.end_s)
        if begin_s < end_s:
            if at_s < begin_s:
                yield replace(span, start_s=at_s, end_s=begin_s)
            yield Span(begin_s, end_s, SpanKind.SLOW_READER)
            at_s = end_s
    if at_s < span.end_s:
        yield replace(span, start_s=at_s)
